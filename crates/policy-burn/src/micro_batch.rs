//! The gradients of micro-batches, which run in parallel and are added in order.

use crate::decoder::Decoder;
use crate::gradients::GradientSum;
use crate::loss::PartialLoss;
use burn::module::Module;
use grpo_core::LossOutput;
use policy::{Result, SequenceBatch};
use rayon::prelude::*;

/// Runs `loss` on every micro-batch and adds everything up: the loss with its metrics, and the gradients.
///
/// Micro-batches run in parallel, each on its own leaves so that their graphs stay apart, and are added in order: the
/// same bits whatever the threads do.
pub(crate) fn accumulate(
    model: &Decoder,
    batches: &[SequenceBatch<'_>],
    loss: impl Fn(&Decoder, &SequenceBatch<'_>) -> Result<PartialLoss> + Sync,
) -> Result<(LossOutput, GradientSum)> {
    let device = model.device();
    let parts: Vec<_> = batches.iter().map(|batch| (batch, model.clone().fork(&device))).collect();
    let parts = parts
        .into_par_iter()
        .map(|(batch, model)| {
            let PartialLoss { backward, output } = loss(&model, batch)?;
            let mut gradients = GradientSum::new();
            gradients.add(&model, backward.backward());
            Ok((output, gradients))
        })
        .collect::<Result<Vec<_>>>()?;
    let (mut sum, mut gradients) = (LossOutput::default(), GradientSum::new());
    for (part, of_part) in parts {
        gradients.merge(of_part);
        sum.loss += part.loss;
        sum.policy_loss += part.policy_loss;
        sum.scores.logp.extend(part.scores.logp);
        sum.scores.entropy.extend(part.scores.entropy);
        sum.metrics.merge(&part.metrics);
    }
    Ok((sum, gradients))
}
