//! The speed of a step.

use super::advantage::Generation;
use super::context::StepContext;
use super::passes::pass_micro_batches;
use grpo_core::TokenBatch;
use grpo_models::{ModelConfig, TokenCounts};
use grpo_policy::Sequence;
use std::ops::Range;

/// The speed of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Sampled tokens per second of the phase `gen`; `None` with `rollout.max_staleness` above 0.
    pub sampled: Option<f64>,
    /// Tokens of prompts and completions per second of the phase `update_actor`; a prompt counts once for its completions in a micro-batch, and
    /// every iteration counts.
    pub trained: Option<f64>,
    /// The useful flops of the updates over the peak of the policy's devices in that time: forward and backward pass of those tokens, without
    /// recomputation.
    pub mfu: Option<f64>,
}

impl Speed {
    /// Computes the speed of a step with `sampled` sampled tokens from the seconds of sampling and of the updates.
    pub(super) fn new(
        context: &StepContext<'_>,
        generation: &Generation,
        sampled: usize,
        gen_seconds: Option<f64>,
        update_seconds: f64,
    ) -> Self {
        let grpo = &context.config.grpo;
        let policy = &*context.parts.policy;
        let parts = pass_micro_batches(grpo, &generation.sample_of);
        let (tokens, counts) = work(policy.model_config(), &generation.sequences, &generation.batch, parts);
        let passes = if context.config.lora.is_some() { 2.0 } else { 3.0 };
        let iterations = grpo.num_iterations as f64;
        let flops = policy.model_config().map(|config| passes * iterations * config.forward_flops(&counts));
        let rate = |amount: f64, seconds: f64| Some(amount / seconds).filter(|rate| rate.is_finite());
        Self {
            // With batches in the background, the phase `gen` is only the wait for them.
            sampled: gen_seconds
                .filter(|_| context.config.rollout.max_staleness == 0)
                .and_then(|seconds| rate(sampled as f64, seconds)),
            trained: rate(iterations * tokens as f64, update_seconds),
            mfu: flops.zip(policy.peak_flops()).and_then(|(flops, peak)| rate(flops, update_seconds * peak)),
        }
    }

    /// Returns the known values as metrics: `tokens_per_second/gen`, `tokens_per_second/update_actor` and `mfu`.
    pub fn metrics(&self) -> impl Iterator<Item = (&'static str, f64)> + use<> {
        let all = [
            ("tokens_per_second/gen", self.sampled),
            ("tokens_per_second/update_actor", self.trained),
            ("mfu", self.mfu),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Returns the tokens of a pass over the micro-batches `parts`, and the counts for its operations. Logits are counted for active tokens only.
fn work(
    config: Option<&ModelConfig>,
    sequences: &[Sequence],
    batch: &TokenBatch,
    parts: impl Iterator<Item = Range<usize>>,
) -> (usize, TokenCounts) {
    let (mut tokens, mut counts) = (0, TokenCounts::default());
    for rows in parts {
        let mut before: Option<&[u32]> = None;
        for (row, Sequence { prompt, completion }) in rows.clone().zip(&sequences[rows]) {
            let is_first = before.replace(prompt) != Some(prompt);
            tokens += completion.len() + if is_first { prompt.len() } else { 0 };
            let Some(config) = config else { continue };
            counts.add(config, prompt.len(), completion.len(), batch.active_in(row));
            if is_first {
                counts.add(config, 0, prompt.len(), 0);
            }
        }
    }
    (tokens, counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_policy::token_batch;

    #[test]
    fn a_prompt_counts_once_for_its_completions_in_a_micro_batch() {
        let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.into(), completion: completion.into() };
        let sequences = [of(&[1, 2, 3], &[4, 5]), of(&[1, 2, 3], &[6]), of(&[7], &[8, 9, 10])];
        // The second token of the last completion is a tool's.
        let batch = token_batch(&sequences).unwrap().with_mask(&[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]).unwrap();
        let config = ModelConfig::default();
        let counted = |parts: &[Range<usize>]| work(Some(&config), &sequences, &batch, parts.iter().cloned());
        let mut expected = TokenCounts::default();
        for (before, count, logits) in [(0, 3, 0), (3, 2, 2), (3, 1, 1), (0, 1, 0), (1, 3, 2)] {
            expected.add(&config, before, count, logits);
        }
        assert_eq!(counted(&[0..2, 2..3]), (10, expected));
        expected.add(&config, 0, 3, 0);
        assert_eq!(counted(&[0..1, 1..3]), (13, expected));
        assert_eq!(work(None, &sequences, &batch, [0..2, 2..3].into_iter()), (10, TokenCounts::default()));
    }
}
