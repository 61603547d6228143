//! The gradients of micro-batches, which run in parallel and are added in order.

use crate::decoder::{Decoder, trained_values};
use crate::gradients::GradientSum;
use crate::loss::PartialLoss;
use burn::module::Module;
use grpo_core::LossOutput;
use policy::{Result, SequenceBatch};
use rayon::prelude::*;

/// Runs `loss` on every micro-batch and adds everything up: the loss with its metrics, and the gradients into `sums`.
///
/// As many micro-batches as there are threads run at the same time, fewer of a large model, each on its own leaves so that their graphs
/// stay apart. Their gradients are added in order, and are gone before the next ones begin: the same bits whatever the threads do, and
/// memory that does not grow with the number of micro-batches.
///
/// # Errors
/// Those of `loss`; `sums` may then hold the gradients of some micro-batches.
pub(crate) fn accumulate(
    model: &Decoder,
    batches: &[SequenceBatch<'_>],
    sums: &mut GradientSum,
    loss: impl Fn(&Decoder, &SequenceBatch<'_>) -> Result<PartialLoss> + Sync,
) -> Result<LossOutput> {
    let device = model.device();
    let mut sum = LossOutput::default();
    for wave in batches.chunks(at_once(model)) {
        let parts: Vec<_> = wave.iter().map(|batch| (batch, model.clone().fork(&device))).collect();
        let parts = parts
            .into_par_iter()
            .map(|(batch, model)| {
                let PartialLoss { backward, output } = loss(&model, batch)?;
                Ok((output, backward.backward(), model))
            })
            .collect::<Result<Vec<_>>>()?;
        for (part, gradients, model) in parts {
            sums.add(&model, gradients);
            sum.loss += part.loss;
            sum.policy_loss += part.policy_loss;
            sum.value_loss += part.value_loss;
            sum.scores.logp.extend(part.scores.logp);
            sum.scores.entropy.extend(part.scores.entropy);
            sum.metrics.merge(&part.metrics);
        }
    }
    Ok(sum)
}

/// Most bytes that the gradients of micro-batches take which run at the same time: one at a time of a model of more than 8 million weights, whose products
/// keep every thread busy by themselves. Accumulation is there to save memory.
const MOST_BYTES: usize = 64 << 20;

/// How many micro-batches run at the same time.
fn at_once(model: &Decoder) -> usize {
    at_once_of(trained_values(model))
}

/// The same for a number of values that are trained.
pub(crate) fn at_once_of(trained: usize) -> usize {
    let of_one = trained.saturating_mul(size_of::<f32>()).max(1);
    (MOST_BYTES / of_one).clamp(1, rayon::current_num_threads())
}
