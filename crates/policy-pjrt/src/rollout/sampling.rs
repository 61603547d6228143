//! Sampling of the next token in a program: the processors of [`LogitsProcessors`], Gumbel-max or argmax, and the log-probability of the
//! chosen token.
//!
//! Legend: B rows, V vocabulary, which may be padded on a mesh; the logits of padding are -inf.

use super::threefry::gumbel_values;
use crate::decoder::{Axis, AxisRules, Broadcast};
use grpo_policy::{LogitsProcessors, Sampling};
use grpo_stablehlo::{Builder, Comparison, Dtype, Number, Reducer, TensorType, Value};

/// The steps of sampling that a program contains; their parameters are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sampler {
    pub(crate) greedy: bool,
    pub(crate) repetition_penalty: bool,
    pub(crate) top_k: bool,
    pub(crate) top_p: bool,
    pub(crate) min_p: bool,
    /// `true` if the program returns the tokens that top_k, top_p and min_p have kept.
    pub(crate) sampling_mask: bool,
}

/// Number of f32 parameters: temperature, repetition penalty, top_p, min_p.
pub(crate) const NUMBERS: usize = 4;

impl Sampler {
    /// Returns the steps of `sampling` for a vocabulary of `vocab`, their f32 parameters, and top_k. The program returns sampling masks if
    /// `return_sampling_mask`, unless every token has the whole vocabulary.
    pub(crate) fn of(sampling: &Sampling, vocab: usize, return_sampling_mask: bool) -> (Self, [f32; NUMBERS], i32) {
        let (greedy, temperature, processors) = match sampling {
            Sampling::Greedy => (true, 1.0, LogitsProcessors::default()),
            Sampling::Random { temperature, processors, .. } => (false, *temperature, *processors),
        };
        let LogitsProcessors { repetition_penalty, top_k, top_p, min_p } = processors;
        let top_k = top_k.filter(|k| (1..vocab).contains(k));
        let top_p = top_p.filter(|p| *p < 1.0);
        let min_p = min_p.filter(|share| *share > 0.0);
        let parts = Self {
            greedy,
            repetition_penalty: processors.penalises_repetition(),
            top_k: top_k.is_some(),
            top_p: top_p.is_some(),
            min_p: min_p.is_some(),
            sampling_mask: return_sampling_mask && (top_k.is_some() || top_p.is_some() || min_p.is_some()),
        };
        let numbers = [temperature, repetition_penalty.unwrap_or(1.0), top_p.unwrap_or(1.0), min_p.unwrap_or(0.0)];
        (parts, numbers.map(|number| number as f32), top_k.map_or(0, |k| k as i32))
    }
}

/// The arguments of sampling.
pub(crate) struct SamplerValues {
    /// `[NUMBERS]`, f32.
    numbers: Value,
    /// A scalar, i32.
    top_k: Value,
    /// The size of the vocabulary without padding.
    vocab: usize,
}

impl SamplerValues {
    /// Declares the arguments as the next ones of a program, for a vocabulary of `vocab` tokens.
    pub(crate) fn arguments(f: &Builder, vocab: usize) -> Self {
        let numbers = f.argument("sampling", TensorType::new(Dtype::F32, [NUMBERS]));
        Self { numbers, top_k: f.argument("top_k", TensorType::scalar(Dtype::I32)), vocab }
    }

    /// Broadcasts the parameter at `index`.
    fn number(&self, index: usize, like: &Value) -> Value {
        self.numbers.slice(&[index], &[index + 1]).reshape(&[]).broadcast_in_dim(like.shape(), &[])
    }
}

/// The chosen tokens.
pub(crate) struct Chosen {
    /// Token ids `[B]`, i32; an id outside the vocabulary where the scores are NaN.
    pub(crate) ids: Value,
    /// Log-probabilities `[B]`, f32; not finite where the scores are not finite.
    pub(crate) logps: Value,
    /// The bits of the kept tokens, u32 `[B, W]`, if the program returns them.
    pub(crate) kept: Option<Value>,
}

/// The number of tokens of a word of a sampling mask.
const BITS: usize = 32;

/// Returns W, the number of words of the sampling mask of a token.
pub(super) fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(BITS)
}

/// Sets `kept` to the tokens of the words `[W]` of a sampling mask; to none if it has the whole vocabulary of `vocab` tokens.
pub(super) fn kept_tokens(words: &[u32], vocab: usize, kept: &mut Vec<u32>) {
    kept.clear();
    let count: u32 = words.iter().map(|word| word.count_ones()).sum();
    if count as usize == vocab {
        return;
    }
    for (index, word) in (0_u32..).zip(words) {
        let mut rest = *word;
        while rest != 0 {
            kept.push(index * BITS as u32 + rest.trailing_zeros());
            // Clears the lowest bit.
            rest &= rest - 1;
        }
    }
}

/// Returns the bits u32 `[B, W]` of the tokens whose scores `[B, V]` are not masked.
fn kept_bits(scores: &Value) -> Value {
    let [b, vocab] = [0, 1].map(|d| scores.shape()[d]);
    let (f, words) = (scores.builder(), mask_words(vocab));
    let kept = (!&scores.eq(&scores.like(f64::NEG_INFINITY))).convert(Dtype::U32);
    let padded = kept.pad(&f.scalar(0_i64, Dtype::U32), &[0, 0], &[0, words * BITS - vocab]);
    let place = f.dense((0..BITS).map(|bit| 1_i64 << bit), TensorType::new(Dtype::U32, [BITS]));
    let by_word = padded.reshape(&[b, words, BITS]);
    (&by_word * place.broadcast_in_dim(by_word.shape(), &[2])).reduce(Reducer::Add, &[2])
}

impl Sampler {
    /// Chooses a token for every row of `logits` `[B, V]`, f32. `keys` `[B, 2]` and `positions` `[B]` determine the random numbers; `seen`
    /// `[B, V]` marks the tokens that the repetition penalty applies to. `rules` shard the vocabulary.
    pub(crate) fn choose(
        self,
        rules: &AxisRules,
        logits: &Value,
        arguments: &SamplerValues,
        keys: &Value,
        positions: &Value,
        seen: Option<&Value>,
    ) -> Chosen {
        let scores = self.scores(logits, arguments, seen);
        let noisy = match self.greedy {
            true => scores.clone(),
            false => {
                let sharded_columns = (rules.parts(Axis::Vocab) > 1).then_some(logits.shape()[1]);
                &scores + gumbel_values(keys, positions, arguments.vocab, sharded_columns)
            }
        };
        // The second reduction picks the smallest id among equal maxima. If a score is NaN, the maximum is NaN, and no score equals it.
        let tokens = tokens(logits);
        let best = noisy.eq(&noisy.reduce(Reducer::Max, &[1]).along_first(&noisy));
        let ids = best.select(&tokens, &tokens.like(logits.shape()[1] as i64)).reduce(Reducer::Min, &[1]);
        let chosen = tokens.eq(&ids.along_first(&tokens)).select(&scores, &scores.like(0.0)).reduce(Reducer::Add, &[1]);
        let max = scores.reduce(Reducer::Max, &[1]);
        let sum = (&scores - max.along_first(&scores)).exp().reduce(Reducer::Add, &[1]);
        Chosen { logps: chosen - max - sum.log(), ids, kept: self.sampling_mask.then(|| kept_bits(&scores)) }
    }

    /// Computes the scores `[B, V]` of `logits` in f32, as defined by [`LogitsProcessors::scores`].
    pub(crate) fn scores(self, logits: &Value, arguments: &SamplerValues, seen: Option<&Value>) -> Value {
        let number = |index| arguments.number(index, logits);
        let mut scores = logits.clone();
        if let Some(seen) = seen.filter(|_| self.repetition_penalty) {
            let penalty = number(1);
            let negative = scores.lt(&scores.like(0.0));
            scores = seen.select(&negative.select(&(&scores * &penalty), &(&scores / &penalty)), &scores);
        }
        if !self.greedy {
            scores = &scores / number(0);
        }
        let leave_out = |scores: &Value, kept: &Value| kept.select(scores, &scores.like(f64::NEG_INFINITY));
        if self.top_k {
            let edge = top_k_edge(&scores, &arguments.top_k);
            scores = leave_out(&scores, &scores.ge(&edge.along_first(&scores)));
        }
        if self.top_p {
            scores = leave_out(&scores, &nucleus(&scores, &number(2)));
        }
        if self.min_p {
            let shares = (&scores - scores.reduce(Reducer::Max, &[1]).along_first(&scores)).exp();
            scores = leave_out(&scores, &shares.ge(&number(3)));
        }
        scores
    }
}

/// Returns the token id of every column: `[B, V]`, i32.
fn tokens(like: &Value) -> Value {
    like.builder().iota(1, like.ty().with_dtype(Dtype::I32))
}

/// Maps f32 `scores` to u32 numbers in the same order: flips the sign bit, and all bits of negative numbers.
fn ordered(scores: &Value) -> Value {
    let bits = scores.bitcast_convert(Dtype::U32);
    let negative = bits.ge(&bits.like(SIGN));
    negative.select(&!&bits, &(&bits | bits.like(SIGN)))
}

const SIGN: i64 = 1 << 31;

/// Returns the largest number of `bits` bits per row, `[B]` of `dtype`, for which `holds` is true. `holds` must be true for 0 and monotone.
fn bisect(like: &Value, bits: usize, dtype: Dtype, holds: impl FnOnce(&Value) -> Value) -> Value {
    let f = like.builder();
    let zero = f.splat(Number::Int(0), TensorType::new(dtype, [like.shape()[0]]));
    let first = f.scalar(1_i64 << (bits - 1), Dtype::U32);
    let found = f.for_loop(bits, &[&first, &zero], |_, carried| {
        let (bit, found) = (&carried[0], &carried[1]);
        let candidate = found | bit.convert(dtype).broadcast_in_dim(found.shape(), &[]);
        let next = holds(&candidate).select(&candidate, found);
        vec![bit / bit.like(2), next]
    });
    found[1].clone()
}

/// Returns the k-th largest score of every row, `[B]`: exact, by bisection over the bits of [`ordered`].
fn top_k_edge(scores: &Value, k: &Value) -> Value {
    let keys = ordered(scores);
    let edge = bisect(scores, 32, Dtype::U32, |candidate| {
        let count = keys.ge(&candidate.along_first(&keys)).convert(Dtype::I32).reduce(Reducer::Add, &[1]);
        count.ge(&k.broadcast_in_dim(count.shape(), &[]))
    });
    // Invert `ordered`.
    let positive = edge.ge(&edge.like(SIGN));
    positive.select(&(&edge & edge.like(SIGN - 1)), &!&edge).bitcast_convert(Dtype::F32)
}

/// Returns the mask `[B, V]` of the tokens that top_p keeps. It drops the least likely tokens whose probabilities sum to at most 1 - p; of
/// equally likely tokens at the edge, the smallest ids are dropped first. The most likely token is always kept.
fn nucleus(scores: &Value, p: &Value) -> Value {
    let max = scores.reduce(Reducer::Max, &[1]).along_first(scores);
    let shares = (scores - &max).exp();
    let sum_where = |hit: &Value| hit.select(&shares, &shares.like(0.0)).reduce(Reducer::Add, &[1]);
    let p = p.slice(&[0, 0], &[scores.shape()[0], 1]).reshape(&[scores.shape()[0]]);
    let limit = (p.like(1.0) - &p) * shares.reduce(Reducer::Add, &[1]);
    let (keys, tokens) = (ordered(scores), tokens(scores));
    let edge =
        bisect(scores, 32, Dtype::U32, |candidate| sum_where(&keys.lt(&candidate.along_first(&keys))).le(&limit));
    let edge = edge.along_first(&keys);
    let (below, at_edge) = (keys.lt(&edge), keys.eq(&edge));
    let bits = (usize::BITS - scores.shape()[1].leading_zeros()) as usize;
    let first = bisect(scores, bits, Dtype::I32, |candidate| {
        let earlier = tokens.lt(&candidate.along_first(&tokens));
        sum_where(&(&below | &at_edge & earlier)).le(&limit)
    });
    let kept = keys.compare(Comparison::Gt, &edge) | &at_edge & tokens.ge(&first.along_first(&tokens));
    // Of several most likely tokens, the one with the largest id.
    let best = scores.eq(&max).select(&tokens, &tokens.like(-1)).reduce(Reducer::Max, &[1]);
    kept | tokens.eq(&best.along_first(&tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::threefry::{gumbel, sample_key};
    use grpo_rng::Purpose;
    use grpo_stablehlo::{Array, Interpreter, Rounding};
    use serde::Deserialize;
    use std::collections::HashSet;

    #[derive(Deserialize)]
    struct Case {
        name: String,
        logits: Vec<f32>,
        seen: HashSet<u32>,
        temperature: f64,
        repetition_penalty: Option<f64>,
        top_k: Option<usize>,
        top_p: Option<f64>,
        min_p: Option<f64>,
        probabilities: Vec<f64>,
    }

    fn random(temperature: f64, processors: LogitsProcessors) -> Sampling {
        Sampling::Random { temperature, processors, seed: 1, purpose: Purpose::Rollout, step: 2, first: 0 }
    }

    /// Returns ids and log-probabilities `[B]` and scores `[B, V]` of rows of logits, from the interpreter, in f32.
    fn sample(
        sampling: &Sampling,
        logits: &[Vec<f32>],
        seen: &HashSet<u32>,
        random: &[[u32; 2]],
        position: u32,
    ) -> (Vec<i64>, Vec<f64>, Vec<f64>) {
        let (rows, vocab) = (logits.len(), logits[0].len());
        let (sampler, numbers, top_k) = Sampler::of(sampling, vocab, false);
        let f = Builder::new();
        let values = f.argument("logits", TensorType::new(Dtype::F32, [rows, vocab]));
        let arguments = SamplerValues::arguments(&f, vocab);
        let keys = f.argument("keys", TensorType::new(Dtype::U32, [rows, 2]));
        let positions = f.splat(i64::from(position), TensorType::new(Dtype::I32, [rows]));
        let marks: Vec<bool> = (0..rows * vocab).map(|i| seen.contains(&((i % vocab) as u32))).collect();
        let marks = f.dense(marks, TensorType::new(Dtype::Pred, [rows, vocab]));
        let chosen = sampler.choose(&AxisRules::default(), &values, &arguments, &keys, &positions, Some(&marks));
        let scores = sampler.scores(&values, &arguments, Some(&marks));
        let results = [("ids", &chosen.ids), ("logps", &chosen.logps), ("scores", &scores)];
        let module = f.finish("sample", &results).unwrap();
        let floats = |shape: &[usize], values: Vec<f64>| Array::floats(Dtype::F32, shape, values).unwrap();
        let keys: Vec<i64> = random.iter().flatten().map(|word| i64::from(*word)).collect();
        let arguments = [
            floats(&[rows, vocab], logits.concat().into_iter().map(f64::from).collect()),
            floats(&[NUMBERS], numbers.map(f64::from).to_vec()),
            Array::ints(Dtype::I32, [], [i64::from(top_k)]).unwrap(),
            Array::ints(Dtype::U32, [rows, 2], keys).unwrap(),
        ];
        let interpreter = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
        let results = interpreter.run(&module, &arguments).unwrap();
        (results[0].to_ints(), results[1].to_floats(), results[2].to_floats())
    }

    #[test]
    fn distributions_match_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/sampling.json");
        let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() > 20);
        let mut left_out = 0;
        for case in cases {
            let Case { repetition_penalty, top_k, top_p, min_p, .. } = case;
            let processors = LogitsProcessors { repetition_penalty, top_k, top_p, min_p };
            let sampling = random(case.temperature, processors);
            let (_, _, scores) = sample(&sampling, std::slice::from_ref(&case.logits), &case.seen, &[[3, 4]], 0);
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            for (id, (score, want)) in scores.iter().zip(&case.probabilities).enumerate() {
                let found = score.exp() / total;
                assert!((found - want).abs() < 2e-6, "{}: token {id} has {found}, expected {want}", case.name);
                assert_eq!(found == 0.0, *want == 0.0, "{}: token {id}", case.name);
                left_out += usize::from(found == 0.0);
            }
        }
        assert!(left_out > 50, "{left_out}");
    }

    #[test]
    fn sampling_is_gumbel_max_with_log_probabilities_of_the_processed_scores() {
        let off = LogitsProcessors::default();
        let logits: Vec<Vec<f32>> =
            (0..6).map(|row| (0..37).map(|id| ((row * 37 + id) as f32 * 0.7).sin() * 3.0).collect()).collect();
        let keys: Vec<[u32; 2]> = (0..6).map(|sample| sample_key(9, Purpose::Rollout, 1, sample)).collect();
        let mut seen = HashSet::new();
        for processors in [
            off,
            LogitsProcessors { top_k: Some(5), ..off },
            LogitsProcessors { top_p: Some(0.7), min_p: Some(0.05), ..off },
            LogitsProcessors { repetition_penalty: Some(1.4), top_k: Some(9), top_p: Some(0.95), min_p: None },
        ] {
            seen.extend([3, 7, 21]);
            let (ids, logps, _) = sample(&random(0.7, processors), &logits, &seen, &keys, 5);
            for row in 0..6 {
                let scores = processors.scores(&logits[row], 0.7, &seen);
                let noise = gumbel(keys[row], 5, 37);
                let noisy: Vec<f64> = scores.iter().zip(&noise).map(|(s, n)| s + f64::from(*n)).collect();
                let best = (0..37).max_by(|a, b| noisy[*a].total_cmp(&noisy[*b])).unwrap();
                assert_eq!(ids[row], best as i64, "{processors:?}, row {row}");
                let total: f64 = scores.iter().map(|score| score.exp()).sum();
                assert!((logps[row] - (scores[best] - total.ln())).abs() < 1e-5, "{processors:?}, row {row}");
            }
        }
    }

    #[test]
    fn greedy_picks_the_smallest_id_of_ties_and_reports_nan() {
        let logits = [vec![0.5, 2.0, 2.0, -1.0], vec![0.0; 4], vec![1.0, f32::NAN, 0.0, 0.0]];
        let (ids, logps, _) = sample(&Sampling::Greedy, &logits, &HashSet::new(), &[[0, 0]; 3], 0);
        assert_eq!(ids, [1, 0, 4]);
        assert!((logps[1] - 0.25_f64.ln()).abs() < 1e-6 && logps[2].is_nan());
    }

    #[test]
    fn processors_that_are_off_are_not_in_the_program() {
        let none = Sampler {
            greedy: false,
            repetition_penalty: false,
            top_k: false,
            top_p: false,
            min_p: false,
            sampling_mask: false,
        };
        let (top_k, top_p) = (Some(0), Some(1.0));
        let processors = LogitsProcessors { repetition_penalty: Some(1.0), top_k, top_p, min_p: Some(0.0) };
        assert_eq!(Sampler::of(&random(1.0, processors), 10, true).0, none);
        let all = LogitsProcessors { top_k: Some(10), ..LogitsProcessors::default() };
        assert_eq!(Sampler::of(&random(1.0, all), 10, true).0, none);
        assert!(Sampler::of(&Sampling::Greedy, 10, true).0.greedy);
    }
}
