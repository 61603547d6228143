#![doc = include_str!("../README.md")]
//! A stream is a function of the run's seed, a [`Purpose`], a step and an index. Checkpoints therefore need no generator
//! state, and the draws of one sample do not depend on the other samples.
//!
//! ```
//! use rand::RngExt;
//! use grpo_rng::{Purpose, stream};
//!
//! let draw = |sample| stream(0, Purpose::Rollout, 7, sample).random::<f64>();
//! assert_eq!(draw(3), draw(3));
//! assert_ne!(draw(3), draw(4));
//! ```
#![forbid(unsafe_code)]

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// The purpose of a stream. Streams of different purposes never overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Initial weights of a model; the index is the [`stable_hash`] of the parameter's name.
    Weights,
    /// Training problems; the index is the cursor of the data set.
    TrainProblem,
    /// Held-out problems; the index is the number of the draw.
    EvalProblem,
    /// Training problems that monitor the supervised warm-up; the index is the number of the draw.
    Probe,
    /// Completions sampled for training; the step is the GRPO step, the index the sample within it.
    Rollout,
    /// Completions sampled for an evaluation; the index is the sample.
    EvalRollout,
    /// Delay before a request to a reward endpoint is repeated; the step is the request, the index the repetition.
    RewardRetry,
}

/// Returns the random stream of `(seed, purpose, step, index)`: ChaCha8 keyed by the first three, with stream number `index`.
///
/// The same arguments give the same numbers on every machine.
pub fn stream(seed: u64, purpose: Purpose, step: u64, index: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&(purpose as u64).to_le_bytes());
    key[16..24].copy_from_slice(&step.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(index);
    rng
}

/// Returns the 64-bit FNV-1a hash of `text`, which is the same on every machine and in every version.
pub fn stable_hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns initial weights of the parameter `name`: independent values between -`bound` and `bound`, which depend only on `seed` and
/// the name.
///
/// ```
/// let values = grpo_rng::uniform_weights(3, 0.5, 7, "lora_head.a");
/// assert!(values.len() == 3 && values.iter().all(|value| value.abs() <= 0.5));
/// ```
pub fn uniform_weights(count: usize, bound: f64, seed: u64, name: &str) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Weights, 0, stable_hash(name));
    (0..count).map(|_| (bound * (2.0 * rng.random::<f64>() - 1.0)) as f32).collect()
}

/// Returns the values `range` of a list of independent normal values with mean 0, which depends only on `seed` and `name`.
///
/// Box-Muller is written out instead of using `rand_distr`: another transform of the same random bits would give other initial weights for
/// a seed, and published runs could not be reproduced.
///
/// ```
/// let values = grpo_rng::normal_weights(0..6, 0.02, 7, "embed_tokens");
/// assert_eq!(values[2..], grpo_rng::normal_weights(2..6, 0.02, 7, "embed_tokens"));
/// ```
pub fn normal_weights(range: Range<usize>, std: f64, seed: u64, name: &str) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Weights, 0, stable_hash(name));
    // A value takes two draws of 64 bits.
    rng.set_word_pos(4 * range.start as u128);
    let value = |_| {
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
        (std * radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
    };
    range.map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;

    #[test]
    fn streams_repeat_and_differ_in_every_argument() {
        let first = |seed, purpose, step, index| stream(seed, purpose, step, index).next_u64();
        let base = first(1, Purpose::Rollout, 2, 3);
        assert_eq!(base, first(1, Purpose::Rollout, 2, 3));
        for other in [
            first(0, Purpose::Rollout, 2, 3),
            first(1, Purpose::EvalRollout, 2, 3),
            first(1, Purpose::Rollout, 1, 3),
            first(1, Purpose::Rollout, 2, 4),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn parts_of_normal_weights_equal_the_whole_list() {
        let whole = normal_weights(0..300, 0.5, 1, "norm");
        for range in [0..1, 1..2, 15..40, 63..130, 299..300] {
            assert_eq!(whole[range.clone()], normal_weights(range, 0.5, 1, "norm"));
        }
    }

    #[test]
    fn hash_is_fnv_1a() {
        assert_eq!(stable_hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(stable_hash("a"), 0xaf63_dc4c_8601_ec8c);
    }
}
