//! The distribution of the next token over the vocabulary.

use crate::sampling::LogitsProcessors;
use pulp::{Arch, Simd, WithSimd};
use std::collections::HashSet;
use std::ops::Range;

/// The tokens whose weights are computed together.
const BLOCK: usize = 1024;
/// The sums of a block, so that a processor can add several weights at a time.
const LANES: usize = 8;

/// The scores of the next token, one for each token of the vocabulary.
enum Scores<'a> {
    /// The logits over the temperature.
    Logits { logits: &'a [f32], temperature: f64 },
    /// The scores after processors; masked tokens have minus infinity.
    Processed(Vec<f64>),
}

/// The softmax of scores. Weights are exp(score - maximum), and the sums of blocks are kept instead of all weights: one large vector for every
/// sequence would pass through memory for every token. The bits do not depend on the processor's instruction set.
pub(crate) struct Categorical<'a> {
    scores: Scores<'a>,
    /// The most likely token, the one with the smallest id among several.
    best: usize,
    max: f64,
    /// The sum of the weights of each block.
    sums: Vec<f64>,
    total: f64,
}

impl<'a> Categorical<'a> {
    /// Creates the distribution of `logits` with the temperature and the processors; `seen` is that of [`LogitsProcessors::scores`].
    pub(crate) fn new(logits: &'a [f32], temperature: f64, processors: &LogitsProcessors, seen: &HashSet<u32>) -> Self {
        let scores = match processors.active().is_empty() {
            true => Scores::Logits { logits, temperature },
            false => Scores::Processed(processors.scores(logits, temperature, seen)),
        };
        let (best, max) = scores.best();
        let blocks = (0..scores.len()).step_by(BLOCK).map(|first| first..scores.len().min(first + BLOCK));
        let mut weights = [0.0; BLOCK];
        let sums: Vec<f64> = blocks.map(|block| scores.weights(block, max, &mut weights)).collect();
        Self { best, max, total: sums.iter().sum(), sums, scores }
    }

    pub(crate) fn best(&self) -> usize {
        self.best
    }

    /// Returns the token at `share` of the distribution, a number in [0, 1), by inverse transform.
    pub(crate) fn at(&self, share: f64) -> usize {
        let mut point = share * self.total;
        let passes = |point: &mut f64, weight: f64| {
            *point -= weight;
            *point < 0.0
        };
        let Some(block) = self.sums.iter().position(|sum| passes(&mut point, *sum)) else {
            // Rounding may leave the point beyond the last token.
            return self.best;
        };
        point += self.sums[block];
        let first = block * BLOCK;
        let block = first..self.scores.len().min(first + BLOCK);
        let mut weights = [0.0; BLOCK];
        self.scores.weights(block.clone(), self.max, &mut weights);
        weights[..block.len()].iter().position(|weight| passes(&mut point, *weight)).map_or(self.best, |i| first + i)
    }

    /// Returns the log-probability of a token.
    pub(crate) fn logp(&self, id: usize) -> f64 {
        self.scores.get(id) - self.max - self.total.ln()
    }

    /// Returns the ids of the tokens that are not masked, in ascending order; `None` if processors mask none.
    pub(crate) fn kept(&self) -> Option<Vec<u32>> {
        let Scores::Processed(scores) = &self.scores else { return None };
        let kept = (0..).zip(scores).filter(|(_, score)| **score > f64::NEG_INFINITY).map(|(id, _)| id);
        Some(kept.collect::<Vec<u32>>()).filter(|kept| kept.len() < scores.len())
    }
}

impl Scores<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Logits { logits, .. } => logits.len(),
            Self::Processed(scores) => scores.len(),
        }
    }

    fn get(&self, id: usize) -> f64 {
        match self {
            Self::Logits { logits, temperature } => f64::from(logits[id]) / temperature,
            Self::Processed(scores) => scores[id],
        }
    }

    /// Returns the first token with the highest score, and the score.
    fn best(&self) -> (usize, f64) {
        let best = match self {
            Self::Logits { logits, .. } => Arch::new().dispatch(First { values: logits, lowest: f32::NEG_INFINITY }),
            Self::Processed(scores) => Arch::new().dispatch(First { values: scores, lowest: f64::NEG_INFINITY }),
        };
        (best, self.get(best))
    }

    /// Computes the weights of a block of at most [`BLOCK`] tokens, and returns their sum.
    fn weights(&self, block: Range<usize>, max: f64, to: &mut [f64; BLOCK]) -> f64 {
        let to = &mut to[..block.len()];
        match self {
            Self::Logits { logits, temperature } => {
                Arch::new().dispatch(Weights { scores: &logits[block], divisor: *temperature, max, to })
            }
            Self::Processed(scores) => Arch::new().dispatch(Weights { scores: &scores[block], divisor: 1.0, max, to }),
        }
    }
}

/// Finds the first of the largest values, with the best instructions of the processor. The index is 0 if no value is above `lowest`.
struct First<'a, T> {
    values: &'a [T],
    lowest: T,
}

impl<T: Copy + PartialOrd> WithSimd for First<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        let Self { values, lowest } = self;
        let larger = |a: T, b: T| if b > a { b } else { a };
        let mut lanes = [lowest; 8 * LANES];
        let chunks = values.chunks_exact(lanes.len());
        let rest = chunks.remainder();
        for values in chunks {
            lanes.iter_mut().zip(values).for_each(|(lane, value)| *lane = larger(*lane, *value));
        }
        let largest = lanes.iter().chain(rest).copied().fold(lowest, larger);
        if largest > lowest { values.iter().position(|value| *value == largest).unwrap_or(0) } else { 0 }
    }
}

/// Computes exp(score / divisor - max), with the best instructions of the processor, and returns the sum.
struct Weights<'a, T> {
    scores: &'a [T],
    divisor: f64,
    max: f64,
    to: &'a mut [f64],
}

impl<T: Copy + Into<f64>> WithSimd for Weights<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let Self { scores, divisor, max, to } = self;
        for (to, score) in to.iter_mut().zip(scores) {
            *to = exp((*score).into() / divisor - max);
        }
        // In a fixed order.
        let mut lanes = [0.0; LANES];
        for weights in to.chunks(LANES) {
            lanes.iter_mut().zip(weights).for_each(|(lane, weight)| *lane += weight);
        }
        lanes.iter().sum()
    }
}

/// The factors 1 / i! of the series of e^r.
const SERIES: [f64; 14] = {
    let mut factors = [1.0; 14];
    let mut i = 1;
    while i < factors.len() {
        factors[i] = factors[i - 1] / i as f64;
        i += 1;
    }
    factors
};

/// Returns e^x for x of at most 0, within two units in the last place; 0 below -708, where the result is no longer a normal number.
///
/// x is n ln 2 + r with the nearest integer n, e^r its series up to r^13. There are no branches, so that several values are computed at once.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // Adding it rounds to an integer, which then stands in the lowest bits of the sum.
    const ROUND: f64 = 1.5 * (1_u64 << 52) as f64;
    // The upper part has 21 trailing zero bits: its product with n is exact.
    const LN_2: [f64; 2] = [6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10];
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN_2[0] - n * LN_2[1];
    let series = SERIES.iter().rev().fold(0.0, |sum, factor| sum * r + factor);
    let power = f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52);
    if x < -708.0 { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn plain(logits: &[f32]) -> Categorical<'_> {
        Categorical::new(logits, 0.7, &LogitsProcessors::default(), &HashSet::new())
    }

    proptest! {
        #[test]
        fn exp_is_within_two_units_in_the_last_place(x in -708.0..=0.0) {
            prop_assert!((exp(x) / x.exp() - 1.0).abs() <= 2.0 * f64::EPSILON, "{x}");
        }

        #[test]
        fn shares_of_the_distribution_are_probabilities(
            logits in prop::collection::vec(-4.0f32..4.0, 1..3 * BLOCK), share in 0.0..1.0,
        ) {
            let of = plain(&logits);
            let id = of.at(share);
            let p: Vec<f64> = (0..logits.len()).map(|id| of.logp(id).exp()).collect();
            let before: f64 = p[..id].iter().sum();
            prop_assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            prop_assert!(before - 1e-12 <= share && share <= before + p[id] + 1e-12, "{share}: {id} from {before}");
        }
    }

    #[test]
    fn the_first_of_the_most_likely_tokens_is_the_best() {
        for length in [1, 2, 63, 64, 65, 1000] {
            for first in 0..length {
                let mut logits: Vec<f32> = (0..length).map(|i| -((i % 5) as f32) - 1.0).collect();
                (first..length).step_by(7).for_each(|i| logits[i] = 2.0);
                assert_eq!(plain(&logits).best(), first, "{length}");
            }
        }
        assert_eq!(plain(&[f32::NAN, f32::NEG_INFINITY, -3.0, f32::NAN]).best(), 2);
        assert_eq!(plain(&[f32::NEG_INFINITY; 200]).best(), 0);
    }

    #[test]
    fn exp_of_the_ends_is_exact() {
        assert_eq!([0.0, -0.0, -708.1, f64::NEG_INFINITY].map(exp), [1.0, 1.0, 0.0, 0.0]);
        assert!(exp(f64::NAN).is_nan());
    }

    #[test]
    fn processors_that_mask_nothing_do_not_change_the_distribution() {
        let logits: Vec<f32> = (0..2 * BLOCK + 5).map(|i| ((i * 37) % 101) as f32 / 25.0).collect();
        let processors = LogitsProcessors { min_p: Some(1e-30), ..LogitsProcessors::default() };
        let processed = Categorical::new(&logits, 0.7, &processors, &HashSet::new());
        let plain = plain(&logits);
        for i in 0..100 {
            let share = f64::from(i) / 100.0;
            assert_eq!(plain.at(share), processed.at(share));
            assert_eq!(plain.logp(i as usize), processed.logp(i as usize));
        }
        assert_eq!((plain.best(), plain.kept()), (processed.best(), None));
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let logits: Vec<f32> = (0..2 * BLOCK).map(|i| (i % 7) as f32).collect();
        let processors = LogitsProcessors { top_k: Some(3), ..LogitsProcessors::default() };
        let of = Categorical::new(&logits, 1.0, &processors, &HashSet::new());
        let kept = of.kept().expect("some are masked");
        let drawn: BTreeSet<u32> = (0..1000).map(|i| of.at(f64::from(i) / 1000.0) as u32).collect();
        assert_eq!(drawn, kept.into_iter().collect());
    }
}
