//! # vespo
//!
//! The log-probability with a detached weight that depends on the sequence's ratio: largest near the old policy, decreasing on
//! both sides.
//!
//! **When to use it.** Strongly off-policy training (asynchronous, many steps per generation). The sum of log-ratios grows with
//! length: on long sequences phi soon approaches 0 on both sides. This is intended, but it also means that such sequences teach
//! little once the policy has moved.
//!
//! **Source.** VESPO, arXiv 2602.10693. Averaged as [dapo](super::dapo). Preset: `configs/loss/trl-vespo.yaml`. verl has no such
//! loss, and `semantics: verl` refuses it.
//!
//! ## Formula
//!
//! ```text
//! log w = Σ_t clamp(l_t - o_t, -20, 20), the sum clamped to [log 1e-8, 20]
//! phi = sg( e^( lambda + k log w - lambda w ) )        k, lambda: by the sign of A (A = 0 counts as positive)
//! P_t = -phi A l_t
//!
//! dP_t/dl_t = -phi A
//! ```
//!
//! phi is 1 at w = 1 and largest at w = k / lambda. The ratio of old policy to sampler is not a factor of this loss: its
//! logarithm, clamped to [log 1e-8, 20] per token, is added to log w.
//!
//! ## Knobs
//!
//! * `vespo_k_pos`, `vespo_k_neg`: exponent of the ratio.
//! * `vespo_lambda_pos`, `vespo_lambda_neg`: decay with the ratio; values below 1e-4 are raised to 1e-4.
//! * `vllm_importance_sampling_mode`: `token_truncate` or `token_mask`. The other modes, including TRL's default, are
//!   refused for batches with `sampler_logp`; TRL refuses them as well.
//! * `importance_sampling_level` is ignored, because the loss has its own sequence-level ratio. `sequence` together with a
//!   bias-corrected KL term is refused; `delta` and `clip_ratio_c` are always refused.
//!
//! ```yaml
//! loss_type: vespo
//! vllm_importance_sampling_mode: token_truncate
//! ```

use super::loss::{Average, Clip, Clipped, Loss, LossTraits, SharedLogRatio};
use super::{PolicyTerm, Ratio, TokenTerms, signs};
use crate::backend_api::real::Real;
use crate::config::checks::finite;
use crate::config::{ImportanceSamplingLevel, KlImportance, LossConfig, Semantics};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The loss `vespo`.
#[derive(Clone, Copy, Debug)]
pub struct Vespo;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::vespo();
/// config.parameters.vespo.k_pos = 1.5;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// `vespo_k_pos`: exponent of the sequence's ratio, for advantages of at least 0.
    #[serde(rename = "vespo_k_pos")]
    #[default(2.0)]
    pub k_pos: f64,
    /// `vespo_k_neg`: exponent of the sequence's ratio, for negative advantages.
    #[serde(rename = "vespo_k_neg")]
    #[default(3.0)]
    pub k_neg: f64,
    /// `vespo_lambda_pos`: decay of the weight with the ratio, for advantages of at least 0.
    #[serde(rename = "vespo_lambda_pos")]
    #[default(3.0)]
    pub lambda_pos: f64,
    /// `vespo_lambda_neg`: decay of the weight with the ratio, for negative advantages.
    #[serde(rename = "vespo_lambda_neg")]
    #[default(2.0)]
    pub lambda_neg: f64,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        finite("vespo_k_pos", self.k_pos)?;
        finite("vespo_k_neg", self.k_neg)?;
        finite("vespo_lambda_pos", self.lambda_pos)?;
        finite("vespo_lambda_neg", self.lambda_neg)
    }
}

/// Bound of a token's log-ratio on both sides, and upper bound of a sequence's log-ratio.
const LARGEST_LOG_RATIO: f64 = 20.0;
/// ln 1e-8: lower bound of a sequence's log-ratio, and of the log-ratio to the sampler.
const SMALLEST_LOG_RATIO: f64 = -18.420_680_743_952_367;

/// Returns the contribution of `weight`, the ratio of old policy to sampler, to the sequence's log-ratio.
pub(crate) fn sampler_log_ratio(weight: f64) -> f64 {
    weight.ln().clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
}

impl Loss for Vespo {
    const TRAITS: LossTraits = LossTraits {
        clip: Clip::ConstantLogRatio(LARGEST_LOG_RATIO),
        shared_log_ratio: Some(SharedLogRatio::Sum),
        clips_sequences: true,
        takes_sampler_ratio: true,
        average: Average::GenerationTokens,
        ..LossTraits::PPO
    };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, _: &Ratio<R>) -> PolicyTerm<R> {
        let own = || terms.logp.clone() - terms.old_logp.clone();
        let log_w = terms.shared.clone().unwrap_or_else(own).clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO);
        let log_w = log_w.stop_gradient();
        let (negative, _) = signs(&terms.advantage);
        let phi = |k: f64, lambda: f64| {
            let lambda = log_w.constant(lambda.max(1e-4));
            (lambda.clone() + log_w.constant(k) * log_w.clone() - lambda * log_w.exp()).exp()
        };
        let Parameters { k_pos, k_neg, lambda_pos, lambda_neg } = config.parameters.vespo;
        let phi = R::select(&negative, &phi(k_neg, lambda_neg), &phi(k_pos, lambda_pos));
        let policy = -(phi.clone() * terms.advantage.clone() * terms.logp.clone());
        PolicyTerm { statistic: phi, ..PolicyTerm::unclipped(policy) }
    }

    fn shared_part<R: Real>(&self, _: &LossConfig, logp: &R, old_logp: &R, _: &R) -> R {
        (logp.clone() - old_logp.clone()).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        let asks = config.importance_sampling_level.is_some_and(|level| level != ImportanceSamplingLevel::Token);
        if asks && config.beta != 0.0 && config.kl_importance() == KlImportance::Ratio {
            return Err(Error::of_key(
                "importance_sampling_level",
                "vespo has its own sequence-level ratio, and its KL term the ratio of tokens: leave \
                 importance_sampling_level out, or set it to `token`",
            ));
        }
        if config.semantics == Semantics::Verl {
            return Err(Error::of_key("semantics", "verl has no vespo: leave semantics out for TRL's"));
        }
        Ok(())
    }

    fn metrics(&self, _: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
        // A fully masked sequence has phi = 1.
        metrics.mean("vespo/phi_seq_mean", clipped.sums.statistic + clipped.masked as f64, clipped.count);
    }
}
