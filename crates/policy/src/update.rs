//! Losses and report of an optimizer step.

use crate::error::{Error, Result};
use grpo_core::batch::TokenWeights;
use grpo_core::{Advantages, LossConfig, LossType, Semantics, TokenBatch};
use grpo_models::ModelConfig;

/// The loss whose gradients [`crate::Policy::accumulate`] accumulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepLoss {
    /// The GRPO loss of the policy, on the columns and weights of each batch's tokens.
    Grpo,
    /// The supervised loss of the warm-up: the negative log-likelihood of the completion tokens, in nats, divided by `tokens`. Its output
    /// has no scores and no metrics.
    CrossEntropy {
        /// Number of completion tokens of the whole optimizer step, over all its micro-batches.
        tokens: usize,
    },
}

impl StepLoss {
    /// Returns the loss configuration with which a policy computes [`StepLoss::CrossEntropy`] on the batches of [`imitation`]: GPG, which
    /// has no ratio.
    pub fn cross_entropy() -> LossConfig {
        LossConfig { semantics: Semantics::Verl, loss_type: LossType::Gpg, ..LossConfig::default() }
    }
}

/// Returns the loss with the softcap of a model's logits.
///
/// # Errors
/// [`Error::Argument`] if the loss has another softcap.
pub fn loss_of_model(loss: &LossConfig, model: &ModelConfig) -> Result<LossConfig> {
    let cap = match (model.final_logit_softcapping, loss.final_logit_softcapping) {
        (Some(cap), Some(own)) if cap != own => {
            let expected = format!("{cap}, which config.json has for the model, or none");
            return Err(Error::argument("loss.final_logit_softcapping", expected, own));
        }
        (cap, own) => cap.or(own),
    };
    Ok(LossConfig { final_logit_softcapping: cap, ..loss.clone() })
}

/// Returns `batch` with weight 1 / `tokens` and advantage 1 for each target, where `tokens` is the number of targets of the whole step.
/// With [`StepLoss::cross_entropy`], the loss is then the mean negative log-likelihood.
///
/// # Errors
/// [`crate::Error::Loss`] if the batch does not accept the weights.
pub fn imitation(batch: &TokenBatch, tokens: usize) -> Result<TokenBatch> {
    let weights =
        TokenWeights { policy: vec![1.0 / tokens as f64; batch.tokens()], ..TokenWeights::zeros(batch.tokens()) };
    let advantages = Advantages::PerSequence(vec![1.0; batch.sequences()]);
    Ok(batch.clone().with_advantages(advantages)?.with_weights(weights)?)
}

/// Result of an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// 2-norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// `true` if the weights were updated.
    pub applied: bool,
}
