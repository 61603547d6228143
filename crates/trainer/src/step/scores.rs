//! Log-probabilities and entropies of what was sampled, without gradients.

use super::updates;
use crate::error::Result;
use crate::micro_batch::{sequence_batches, split_evenly};
use crate::train_config::GrpoConfig;
use grpo_core::{Scores, TokenBatch};
use policy::{Policy, Sequence, Weights};

/// Scores of all completion tokens under the weights `of`, in the micro-batches of the updates, so that an unchanged policy
/// gets a ratio of 1.
pub(super) fn score_all(
    policy: &mut dyn Policy,
    of: Weights,
    sequences: &[Sequence],
    batch: &TokenBatch,
    grpo: &GrpoConfig,
) -> Result<Scores> {
    let parts = updates(grpo).flat_map(|rows| {
        split_evenly(rows.len(), grpo.gradient_accumulation_steps)
            .map(move |part| rows.start + part.start..rows.start + part.end)
    });
    Ok(policy.score(of, &sequence_batches(sequences, batch, parts)?)?)
}
