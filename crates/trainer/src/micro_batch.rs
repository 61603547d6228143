//! Gradients of one optimizer step, micro-batch by micro-batch.

use crate::error::Result;
use crate::loss::PartialLoss;
use crate::model::Decoder;
use crate::optim::GradientSum;
use burn::module::Module;
use grpo_core::{Metrics, Scores};
use rayon::prelude::*;
use std::ops::Range;

/// The sums over all micro-batches of an optimizer step.
pub(crate) struct Accumulated {
    pub(crate) gradients: GradientSum,
    pub(crate) loss: f64,
    pub(crate) policy_loss: f64,
    /// Of all tokens, in the order of the micro-batches.
    pub(crate) scores: Scores,
    pub(crate) metrics: Metrics,
}

/// Runs `loss` on `count` sequences in `parts` micro-batches and adds everything up.
///
/// Micro-batches run in parallel, each on its own leaves so that their graphs stay apart, and are added in order: the
/// same bits whatever the threads do.
pub(crate) fn accumulate(
    policy: &Decoder,
    count: usize,
    parts: usize,
    loss: impl Fn(&Decoder, Range<usize>) -> Result<PartialLoss> + Sync,
) -> Result<Accumulated> {
    let device = policy.device();
    let parts: Vec<_> = split_evenly(count, parts).map(|part| (part, policy.clone().fork(&device))).collect();
    let parts = parts
        .into_par_iter()
        .map(|(part, policy)| {
            let PartialLoss { backward, value, policy: policy_loss, scores, metrics } = loss(&policy, part)?;
            let mut gradients = GradientSum::new();
            gradients.add(&policy, backward.backward());
            Ok(Accumulated { gradients, loss: value, policy_loss, scores, metrics })
        })
        .collect::<Result<Vec<_>>>()?;
    let mut sum = Accumulated {
        gradients: GradientSum::new(),
        loss: 0.0,
        policy_loss: 0.0,
        scores: Scores::default(),
        metrics: Metrics::default(),
    };
    for part in parts {
        sum.gradients.merge(part.gradients);
        sum.loss += part.loss;
        sum.policy_loss += part.policy_loss;
        sum.scores.logp.extend(part.scores.logp);
        sum.scores.entropy.extend(part.scores.entropy);
        sum.metrics.merge(&part.metrics);
    }
    Ok(sum)
}

/// `count` items in at most `parts` ranges whose lengths differ by at most one.
pub(crate) fn split_evenly(count: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = parts.clamp(1, count.max(1));
    (0..parts).map(move |i| count * i / parts..count * (i + 1) / parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_splits_cover_everything_once() {
        let ranges: Vec<_> = split_evenly(10, 3).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..10]);
        assert_eq!(split_evenly(2, 5).collect::<Vec<_>>(), [0..1, 1..2]);
    }
}
