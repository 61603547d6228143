//! Log-probabilities and entropies of what was sampled, without gradients.

use super::updates;
use crate::error::Result;
use crate::loss::PolicyLoss;
use crate::micro_batch::split_evenly;
use crate::model::Decoder;
use crate::sequences::{Sequence, completion_hidden};
use crate::train_config::GrpoConfig;
use grpo_core::{Scores, TokenBatch};
use rayon::prelude::*;
use std::ops::Range;

/// Scores of all completion tokens under `model`, in the micro-batches of the updates, so that an unchanged policy gets a
/// ratio of 1.
pub(super) fn score_all(
    model: &Decoder,
    sequences: &[Sequence],
    batch: &TokenBatch,
    grpo: &GrpoConfig,
    loss: &PolicyLoss,
) -> Result<Scores> {
    let parts = updates(grpo).flat_map(|rows| {
        split_evenly(rows.len(), grpo.gradient_accumulation_steps)
            .map(move |part| rows.start + part.start..rows.start + part.end)
    });
    score_parts(model, sequences, batch, parts, loss)
}

/// Scores of all completion tokens under `model`, part by part.
pub(super) fn score_parts(
    model: &Decoder,
    sequences: &[Sequence],
    batch: &TokenBatch,
    parts: impl Iterator<Item = Range<usize>>,
    loss: &PolicyLoss,
) -> Result<Scores> {
    let parts: Vec<_> = parts.map(|rows| (rows, model.clone())).collect();
    let scores = parts
        .into_par_iter()
        .map(|(rows, model)| {
            let hidden = completion_hidden(&model, &sequences[rows.clone()])?;
            loss.score(hidden, model.lm_head(), &batch.select_sequences(rows)?)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut all = Scores::default();
    for part in scores {
        all.logp.extend(part.logp);
        all.entropy.extend(part.entropy);
    }
    Ok(all)
}
