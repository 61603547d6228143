//! Gradients of micro-batches, computed in parallel and added in order.

use crate::decoder::{Decoder, trained_values};
use crate::gradients::GradientSum;
use crate::loss::PartialLoss;
use burn::module::Module;
use grpo_core::LossOutput;
use grpo_policy::{Result, RouterStatistics, SequenceBatch};
use rayon::prelude::*;

/// Runs `loss` on every micro-batch; sums losses and metrics, and adds gradients to `sums`.
///
/// As many micro-batches as there are threads run concurrently (fewer for large models), each on its own copy of the leaves, so that
/// autodiff graphs are separate. Gradients of such a group are added in order and freed before the next group starts. Results are therefore
/// bit-identical for any thread timing, and memory does not grow with the number of micro-batches.
///
/// # Errors
/// Errors of `loss`; `sums` may then hold the gradients of some micro-batches.
pub(crate) fn accumulate(
    model: &Decoder,
    batches: &[SequenceBatch<'_>],
    sums: &mut GradientSum,
    loss: impl Fn(&Decoder, &SequenceBatch<'_>) -> Result<PartialLoss> + Sync,
) -> Result<LossOutput> {
    let device = model.device();
    let (mut sum, mut statistics) = (LossOutput::default(), RouterStatistics::default());
    for wave in batches.chunks(at_once(model)) {
        let parts: Vec<_> = wave.iter().map(|batch| (batch, model.clone().fork(&device))).collect();
        let parts = parts
            .into_par_iter()
            .map(|(batch, model)| {
                let PartialLoss { backward, output, routers, embedded } = loss(&model, batch)?;
                let mut gradients = backward.backward();
                let embedded = embedded.map(|rows| rows.gradient(&mut gradients));
                Ok(((output, routers), (gradients, embedded), model))
            })
            .collect::<Result<Vec<_>>>()?;
        for ((part, routers), (gradients, embedded), model) in parts {
            sums.add_with(&model, gradients, embedded.as_ref());
            sum.merge(part);
            statistics.merge(routers);
        }
    }
    statistics.record(&mut sum.metrics);
    Ok(sum)
}

/// Largest total size of the gradients of concurrent micro-batches. Above 8 million weights, micro-batches run one at a time: their
/// products use all threads anyway, and accumulation exists to save memory.
const MOST_BYTES: usize = 64 << 20;

/// Returns the number of micro-batches that run concurrently.
fn at_once(model: &Decoder) -> usize {
    at_once_of(trained_values(model))
}

/// Returns the same for a number of trained values.
pub(crate) fn at_once_of(trained: usize) -> usize {
    let of_one = trained.saturating_mul(size_of::<f32>()).max(1);
    (MOST_BYTES / of_one).clamp(1, rayon::current_num_threads())
}
