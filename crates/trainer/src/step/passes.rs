//! The updates of a step and their micro-batches, as ranges of samples and of sequences.

use crate::micro_batch::split_evenly;
use grpo_run_config::GrpoConfig;
use std::ops::Range;

/// Returns the samples of each optimizer step of one pass: contiguous whole groups.
pub(super) fn updates(grpo: &GrpoConfig) -> impl Iterator<Item = Range<usize>> {
    let per_prompt = grpo.num_generations;
    split_evenly(grpo.prompts_per_step, grpo.steps_per_generation)
        .map(move |groups| groups.start * per_prompt..groups.end * per_prompt)
}

/// Returns the sequences of every micro-batch of a pass. `sample_of` has the sample of each sequence.
pub(super) fn pass_micro_batches<'a>(
    grpo: &'a GrpoConfig,
    sample_of: &'a [usize],
) -> impl Iterator<Item = Range<usize>> + 'a {
    updates(grpo).flat_map(|samples| micro_batches(grpo, rows_of(sample_of, samples)))
}

/// Returns the sequences of every micro-batch of an update with the sequences `rows`. Micro-batches have at most
/// [`GrpoConfig::micro_batch_sequences`] sequences, also if conversations of agents have several rows.
pub(super) fn micro_batches(grpo: &GrpoConfig, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let parts = grpo.gradient_accumulation_steps.max(rows.len().div_ceil(grpo.micro_batch_sequences().max(1)));
    split_evenly(rows.len(), parts).map(move |part| rows.start + part.start..rows.start + part.end)
}

/// Returns the sequences of some samples.
pub(super) fn rows_of(sample_of: &[usize], samples: Range<usize>) -> Range<usize> {
    let first = |sample: usize| sample_of.partition_point(|of| *of < sample);
    first(samples.start)..first(samples.end)
}
