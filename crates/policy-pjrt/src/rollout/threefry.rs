//! Random numbers of sampling: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), as in Random123 and JAX.
//!
//! The generator has no state: a random number is a function of a key, one per sample, and a counter, made of the token's position in the
//! completion and of its id. A sample therefore draws the same numbers in any slot of any batch. The algorithm is generic over [`Word`] and
//! runs both on the host and in programs.
//!
//! Legend: B rows, V vocabulary.

use grpo_rng::Purpose;
use grpo_stablehlo::{Binary, Dtype, TensorType, Value};

/// A word of 32 bits, or a tensor of words.
pub(crate) trait Word: Clone {
    /// Returns a constant of the same shape.
    fn number(&self, number: u32) -> Self;
    /// Adds modulo 2^32.
    fn plus(&self, other: &Self) -> Self;
    /// Computes the exclusive or.
    fn xor(&self, other: &Self) -> Self;
    /// Rotates the bits to the left.
    fn rotated(&self, bits: u32) -> Self;
}

impl Word for u32 {
    fn number(&self, number: u32) -> Self {
        number
    }

    fn plus(&self, other: &Self) -> Self {
        self.wrapping_add(*other)
    }

    fn xor(&self, other: &Self) -> Self {
        self ^ other
    }

    fn rotated(&self, bits: u32) -> Self {
        self.rotate_left(bits)
    }
}

/// A tensor of dtype u32.
impl Word for Value {
    fn number(&self, number: u32) -> Self {
        self.like(i64::from(number))
    }

    fn plus(&self, other: &Self) -> Self {
        self + other
    }

    fn xor(&self, other: &Self) -> Self {
        self.binary(Binary::Xor, other)
    }

    fn rotated(&self, bits: u32) -> Self {
        let left = self.binary(Binary::ShiftLeft, &self.number(bits));
        left | self.binary(Binary::ShiftRightLogical, &self.number(32 - bits))
    }
}

const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
/// Constant of the key schedule.
const PARITY: u32 = 0x1BD1_1BDA;

/// Returns the two random words of a counter.
pub(crate) fn threefry2x32<W: Word>(key: [W; 2], counter: [W; 2]) -> [W; 2] {
    let both = key[0].xor(&key[1]);
    let keys = [key[0].clone(), key[1].clone(), both.xor(&both.number(PARITY))];
    let [mut x, mut y] = [counter[0].plus(&keys[0]), counter[1].plus(&keys[1])];
    for group in 0..5 {
        for bits in ROTATIONS[group % 2] {
            x = x.plus(&y);
            y = y.rotated(bits).xor(&x);
        }
        x = x.plus(&keys[(group + 1) % 3]);
        y = y.plus(&keys[(group + 2) % 3]);
        y = y.plus(&y.number(group as u32 + 1));
    }
    [x, y]
}

/// Returns the random key of a sample.
pub(crate) fn sample_key(seed: u64, purpose: Purpose, step: u64, sample: u64) -> [u32; 2] {
    let words = |number: u64| [(number >> 32) as u32, number as u32];
    let key = threefry2x32(words(seed), words(purpose as u64));
    threefry2x32(threefry2x32(key, words(step)), words(sample))
}

/// Returns the number of counters for a vocabulary of `vocab`: counter j gives the random words of tokens j and j + counters.
fn counters(vocab: usize) -> usize {
    vocab.div_ceil(2)
}

/// Returns standard Gumbel noise `[V]` for token `position` of the completion of the sample with this key: [`gumbel_values`] on the host.
#[cfg(test)]
pub(super) fn gumbel(key: [u32; 2], position: u32, vocab: usize) -> Vec<f32> {
    let counters = counters(vocab);
    let words = |token: usize| threefry2x32(key, [position, (token % counters) as u32])[token / counters];
    (0..vocab)
        .map(|token| {
            let bits = words(token);
            let (high, low) = ((bits >> 8) as f32, (bits & 0xFF) as f32);
            let uniform = high * HIGH + (low + 0.5) * LOW;
            -(-(-uniform.min(BELOW_ONE)).ln_1p()).ln()
        })
        .collect()
}

/// Weight of the upper 24 bits: 2^-24.
const HIGH: f32 = 1.0 / 16_777_216.0;
/// Weight of the lower 8 bits: 2^-32.
const LOW: f32 = HIGH / 256.0;
/// The largest f32 below 1.
const BELOW_ONE: f32 = 1.0 - HIGH;

/// Returns standard Gumbel noise `[B, V]`, f32, for tokens at `positions` `[B]`, i32, of the completions of samples with `keys` `[B, 2]`,
/// u32. The argmax of scores plus noise is a sample from the softmax of the scores.
///
/// With `sharded_columns`, words are computed from the counter of every column, so that a device makes the noise of its shard of the vocabulary,
/// which may be padded to this number of columns. Otherwise every counter is computed once, and its two words are the noise of two tokens; on a
/// mesh these would have to be exchanged.
pub(crate) fn gumbel_values(keys: &Value, positions: &Value, vocab: usize, sharded_columns: Option<usize>) -> Value {
    let (builder, rows, counters) = (keys.builder(), keys.shape()[0], counters(vocab));
    let ty = TensorType::new(Dtype::U32, [rows, sharded_columns.unwrap_or(counters)]);
    let wide = |of_rows: &Value| of_rows.broadcast_in_dim(&ty.shape, &[0]);
    let key = |word: usize| wide(&keys.slice(&[0, word], &[rows, word + 1]).reshape(&[rows]));
    let words = |counter| threefry2x32([key(0), key(1)], [wide(&positions.convert(Dtype::U32)), counter]);
    let index = builder.iota(1, ty.clone());
    let bits = match sharded_columns {
        Some(_) => {
            let is_first = index.lt(&index.like(counters as i64));
            let [first, second] = words(is_first.select(&index, &(&index - index.like(counters as i64))));
            is_first.select(&first, &second)
        }
        None => builder.concatenate(&words(index).each_ref(), 1).slice(&[0, 0], &[rows, vocab]),
    };
    // Both parts are below 2^24 and so exact in f32; i32 converts faster than u32.
    let number = |bits: Value| bits.convert(Dtype::I32).convert(Dtype::F32);
    let high = number(bits.binary(Binary::ShiftRightLogical, &bits.like(8)));
    let low = number(&bits & bits.like(0xFF));
    let uniform = &high * high.like(f64::from(HIGH)) + (&low + low.like(0.5)) * low.like(f64::from(LOW));
    // Small uniform numbers have the finest resolution, and they become the largest noise, which decides the argmax.
    let exponential = -(-uniform.min(&uniform.like(f64::from(BELOW_ONE)))).log1p();
    -exponential.log()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_match_random123() {
        // kat_vectors of Random123: threefry2x32 20, counter, key, result.
        for (counter, key, expected) in [
            ([0, 0], [0, 0], [0x6b20_0159, 0x99ba_4efe]),
            ([u32::MAX; 2], [u32::MAX; 2], [0x1cb9_96fc, 0xbb00_2be7]),
            ([0x243f_6a88, 0x85a3_08d3], [0x1319_8a2e, 0x0370_7344], [0xc492_3a9c, 0x483d_f7a0]),
        ] {
            assert_eq!(threefry2x32(key, counter), expected);
        }
    }

    #[test]
    fn keys_differ_in_every_argument() {
        let base = sample_key(1, Purpose::Rollout, 2, 3);
        for other in [
            sample_key(0, Purpose::Rollout, 2, 3),
            sample_key(1, Purpose::EvalRollout, 2, 3),
            sample_key(1, Purpose::Rollout, 1, 3),
            sample_key(1, Purpose::Rollout, 2, 4),
            sample_key(1 << 32, Purpose::Rollout, 2, 3),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn noise_of_a_sharded_vocabulary_is_that_of_a_whole_one() {
        for vocab in [12, 37] {
            let f = grpo_stablehlo::Builder::new();
            let keys = f.dense([3, 4, 5, 6], TensorType::new(Dtype::U32, [2, 2]));
            let positions = f.dense([7, 8], TensorType::new(Dtype::I32, [2]));
            let [whole, sharded] = [None, Some(vocab)].map(|columns| gumbel_values(&keys, &positions, vocab, columns));
            let module = f.finish("noise", &[("whole", &whole), ("sharded", &sharded)]).unwrap();
            let noise = module.interpret(&[]).unwrap();
            assert_eq!(noise[0].to_floats(), noise[1].to_floats());
            let expected = [gumbel([3, 4], 7, vocab), gumbel([5, 6], 8, vocab)].concat();
            assert_eq!(noise[1].to_floats().len(), expected.len());
            for (found, expected) in noise[1].to_floats().into_iter().zip(expected) {
                assert!((found - f64::from(expected)).abs() < 1e-3, "{found} {expected}");
            }
        }
    }

    #[test]
    fn gumbel_noise_has_the_mean_and_variance_of_the_distribution() {
        let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for position in 0..200 {
            for number in gumbel([3, 4], position, 999) {
                assert!(number.is_finite());
                count += 1.0;
                sum += f64::from(number);
                squares += f64::from(number).powi(2);
            }
        }
        let (mean, variance) = (sum / count, squares / count - (sum / count).powi(2));
        let (expected, of_variance) = (0.577_215_664_9, std::f64::consts::PI.powi(2) / 6.0);
        assert!((mean - expected).abs() < 0.01 && (variance - of_variance).abs() < 0.03, "{mean} {variance}");
    }
}
