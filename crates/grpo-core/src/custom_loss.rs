//! Losses of the caller, on the log-probabilities and entropies that a backend computes.

use crate::backend::{LossOutput, Scores};
use crate::batch::{Advantages, TokenBatch, TokenWeights};
use crate::config::{LossConfig, LossType};
use crate::error::{Error, Result};
use crate::gradients::{GradientSpec, GradsMut};
use crate::metrics::Metrics;
use crate::plan_cache::PlanCache;
use crate::policy::{PolicyInput, PolicySpec};
use crate::token_losses::TokenLosses;

/// The caller's own loss of a batch: its value, and its derivatives by the scores of every token.
///
/// [`GrpoLoss::step_with`](crate::GrpoLoss::step_with) takes a function that returns it. A built-in loss converts to it, so own terms can be
/// added to one:
///
/// ```
/// use grpo_core::{CustomLoss, LossConfig, Scores, TokenBatch};
///
/// # let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?.with_advantages(vec![1.0])?;
/// # let scores = Scores { logp: vec![-0.1, -1.2], entropy: vec![0.5; 2] };
/// let mut loss = CustomLoss::from(LossConfig::dapo().token_losses(&batch, &scores)?);
/// // An imitation term: -0.1 x the mean of logp.
/// for &row in batch.active_rows() {
///     let weight = 0.1 / batch.active_tokens() as f64;
///     loss.loss -= weight * f64::from(scores.logp[row]);
///     loss.dlogp[row] -= weight;
/// }
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CustomLoss {
    /// The loss.
    pub loss: f64,
    /// Derivative of the loss by the log-probability of each token `[N]`; values at masked tokens are not read.
    pub dlogp: Vec<f64>,
    /// Derivative of the loss by the entropy of each token `[N]`, or empty if the loss does not depend on entropies.
    pub dentropy: Vec<f64>,
}

impl From<TokenLosses> for CustomLoss {
    fn from(TokenLosses { loss, dlogp, dentropy, .. }: TokenLosses) -> Self {
        Self { loss: loss.iter().sum(), dlogp, dentropy }
    }
}

impl CustomLoss {
    /// Returns a batch whose loss under [`linear`] has these derivatives: the sum of dlogp x logp and dentropy x entropy.
    fn linear_batch(&self, batch: &TokenBatch) -> Result<TokenBatch> {
        let tokens = batch.tokens();
        let lists = [("dlogp", &self.dlogp), ("dentropy", &self.dentropy)];
        for (name, list) in lists.into_iter().filter(|(name, list)| *name == "dlogp" || !list.is_empty()) {
            batch.check_numbers(name, list)?;
        }
        let (mut policy, mut entropy) = (vec![0.0; tokens], vec![0.0; tokens]);
        for &row in batch.active_rows() {
            policy[row] = self.dlogp[row];
            entropy[row] = -self.dentropy.get(row).copied().unwrap_or(0.0);
        }
        let weights = TokenWeights { policy, entropy, ..TokenWeights::zeros(tokens) };
        let advantages = Advantages::PerToken(vec![-1.0; tokens]);
        batch.scored_only().with_advantages(advantages)?.with_weights(weights)
    }
}

/// Returns the loss whose terms are -A logp and the entropy bonus, with the transforms of logits of `config`.
pub(crate) fn linear(config: &LossConfig) -> LossConfig {
    LossConfig {
        loss_type: LossType::Reinforce,
        entropy_coef: 1.0,
        temperature: config.temperature,
        temperature_mode: Some(config.temperature_mode()),
        logit_scale: config.logit_scale,
        final_logit_softcapping: config.final_logit_softcapping,
        ..LossConfig::default()
    }
}

impl PlanCache {
    /// Computes a loss of the caller and its gradients: scores `batch`, calls `loss` with the scores, and adds gradients to `grads`. Of the
    /// configuration, only temperature, logit scale and softcap apply. Costs one forward pass more than a built-in loss.
    ///
    /// # Errors
    /// The errors of [`PlanCache::with_plan`] and of `loss`; [`Error::Shape`] or [`Error::Value`] for derivatives of a wrong length, or that
    /// are not finite at an active token. Gradients are then unchanged.
    pub fn step_with<E: From<Error>>(
        &self,
        (spec, gradients): (PolicySpec, GradientSpec),
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
        loss: impl FnOnce(&Scores) -> Result<CustomLoss, E>,
    ) -> Result<LossOutput, E> {
        self.linear().with_plan(spec, Some(gradients), batch, |plan| {
            let scores = plan.score(policy, batch)?;
            batch.check_scores(&scores)?;
            let own = loss(&scores)?;
            plan.value_and_grad(policy, &own.linear_batch(batch)?, grads)?;
            let mut metrics = Metrics::default();
            let entropies = batch.active_rows().iter().map(|row| f64::from(scores.entropy[*row]));
            metrics.mean("entropy", entropies.sum(), batch.active_tokens() as f64);
            Ok(LossOutput::new(own.loss, own.loss, scores, metrics))
        })
    }
}
