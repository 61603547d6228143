//! The optimizer step: what the training loop asks for, and what it hears.

use crate::error::Result;
use grpo_core::batch::TokenWeights;
use grpo_core::{Advantages, LossConfig, LossType, Semantics, TokenBatch};

/// The loss whose gradients [`crate::Policy::accumulate`] adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepLoss {
    /// The GRPO loss that the policy was made with, of the columns and weights in each batch's tokens.
    Grpo,
    /// The supervised loss of the warm-up: the negative log-likelihood of the completion tokens, in nats, divided by
    /// `tokens`. Its output has no scores and no metrics.
    CrossEntropy {
        /// The number of completion tokens of the whole optimizer step, over all its micro-batches.
        tokens: usize,
    },
}

impl StepLoss {
    /// The loss by which a policy computes [`StepLoss::CrossEntropy`] of the batches of [`imitation`]: that of the family that has no
    /// ratio.
    pub fn cross_entropy() -> LossConfig {
        LossConfig { semantics: Semantics::Verl, loss_type: LossType::Gpg, ..LossConfig::default() }
    }
}

/// `batch`, each target to be imitated with weight 1 / `tokens`, the number of targets of the whole step: with the loss
/// [`StepLoss::cross_entropy`] it is the mean negative log-likelihood.
///
/// # Errors
/// [`crate::Error::Loss`] for a batch that takes no weights.
pub fn imitation(batch: &TokenBatch, tokens: usize) -> Result<TokenBatch> {
    let weights =
        TokenWeights { policy: vec![1.0 / tokens as f64; batch.tokens()], ..TokenWeights::zeros(batch.tokens()) };
    let advantages = Advantages::PerSequence(vec![1.0; batch.sequences()]);
    Ok(batch.clone().with_advantages(advantages)?.with_weights(weights)?)
}

/// What became of an accumulated gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// The 2-norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Whether the weights were updated.
    pub applied: bool,
}
