//! Log-probabilities, entropies and values of sampled tokens, without gradients.

use super::updates;
use crate::error::Result;
use crate::micro_batch::{sequence_batches, split_evenly};
use grpo_core::{Scores, TokenBatch};
use policy::{Policy, Sequence, Weights};
use run_config::GrpoConfig;
use std::ops::Range;

/// Scores all completion tokens with the weights `of`, in the same micro-batches as the updates, so that an unchanged policy gets ratios of
/// exactly 1.
pub(super) fn score_all(
    policy: &mut dyn Policy,
    of: Weights,
    sequences: &[Sequence],
    batch: &TokenBatch,
    grpo: &GrpoConfig,
) -> Result<Scores> {
    Ok(policy.score(of, &sequence_batches(sequences, batch, micro_batches(grpo))?)?)
}

/// Returns the values of the states before all completion tokens, in the same micro-batches.
pub(super) fn values_of_all(
    policy: &mut dyn Policy,
    sequences: &[Sequence],
    batch: &TokenBatch,
    grpo: &GrpoConfig,
) -> Result<Vec<f32>> {
    Ok(policy.values(&sequence_batches(sequences, batch, micro_batches(grpo))?)?)
}

/// Returns the sequences of every micro-batch of a pass.
fn micro_batches(grpo: &GrpoConfig) -> impl Iterator<Item = Range<usize>> {
    updates(grpo).flat_map(|rows| {
        split_evenly(rows.len(), grpo.gradient_accumulation_steps)
            .map(move |part| rows.start + part.start..rows.start + part.end)
    })
}
