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

/// The settings of AdamW (arXiv 1711.05101) that stay the same from step to step. The learning rate is an argument of
/// [`crate::Policy::apply`].
///
/// ```
/// let adamw = policy::AdamWConfig { skip_grad_norm: Some(10.0), ..Default::default() };
/// assert!(adamw.skips());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWConfig {
    /// The decay of the first moment, in [0, 1).
    pub adam_beta1: f64,
    /// The decay of the second moment, in [0, 1).
    pub adam_beta2: f64,
    /// The number that is added to the root of the second moment, above 0.
    pub adam_epsilon: f64,
    /// The decoupled weight decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// The largest 2-norm of the whole gradient; 0 switches clipping off.
    pub max_grad_norm: f64,
    /// The 2-norm, before clipping, above which a gradient is not applied; one that is not finite is not applied either.
    /// `None` applies every gradient that is finite, and one that is not is an error.
    pub skip_grad_norm: Option<f64>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            adam_beta1: 0.9,
            adam_beta2: 0.98,
            adam_epsilon: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            skip_grad_norm: None,
        }
    }
}

impl AdamWConfig {
    /// Whether an update with too large a gradient, or with one that is not finite, is skipped instead of failing.
    pub fn skips(&self) -> bool {
        self.skip_grad_norm.is_some()
    }
}

/// What became of an accumulated gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// The 2-norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// Whether the weights were updated.
    pub applied: bool,
}
