//! The speed of a step.

use super::StepContext;
use super::advantage::Generation;
use models::TokenCounts;
use policy::Sequence;

/// The speed of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Sampled tokens per second of the phase `gen`.
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
        let micro_batches = super::pass_micro_batches(grpo, &generation.sample_of);
        let (mut tokens, mut counts) = (0, TokenCounts::default());
        for rows in micro_batches.filter_map(|rows| generation.sequences.get(rows)) {
            for (prompt, completions) in by_prompt(rows) {
                tokens += prompt.len();
                for completion in completions.iter().map(|sequence| &sequence.completion) {
                    tokens += completion.len();
                    if let Some(config) = policy.model_config() {
                        counts.add(config, prompt.len(), completion.len(), completion.len());
                    }
                }
                if let Some(config) = policy.model_config() {
                    counts.add(config, 0, prompt.len(), 0);
                }
            }
        }
        let passes = if context.config.lora.is_some() { 2.0 } else { 3.0 };
        let iterations = grpo.num_iterations as f64;
        let flops = policy.model_config().map(|config| passes * iterations * config.forward_flops(&counts));
        let rate = |amount: f64, seconds: f64| Some(amount / seconds).filter(|rate| rate.is_finite());
        Self {
            sampled: gen_seconds.and_then(|seconds| rate(sampled as f64, seconds)),
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

/// Returns neighbouring sequences with the same prompt.
fn by_prompt(sequences: &[Sequence]) -> impl Iterator<Item = (&[u32], &[Sequence])> {
    sequences.chunk_by(|a, b| a.prompt == b.prompt).map(|group| (&group[0].prompt[..], group))
}
