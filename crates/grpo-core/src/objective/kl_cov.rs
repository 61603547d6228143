//! # kl_cov
//!
//! The ratio without a clip. The tokens with the largest covariance between advantage and log-probability pay a penalty for moving
//! away from the old policy.
//!
//! **When to use it.** If entropy collapses because of a few tokens. Nothing bounds the ratio of the other tokens, so use few
//! updates per batch.
//!
//! **Source.** arXiv 2505.22617. verl's `loss_mode: kl_cov`. Preset: `configs/loss/verl-kl-cov.yaml`.
//!
//! ## Formula
//!
//! ```text
//! cov_t = (A_t - mean A)(l_t - mean l)                means over active tokens
//! P_t = -A r_t + ppo_kl_coef |l_t - o_t|              for the max(1, floor(kl_cov_ratio N)) tokens of largest cov_t
//! P_t = -A r_t                                        for the others
//!
//! dP_t/dl_t = -A r_t + ppo_kl_coef sign(l_t - o_t)    for the selected tokens, without the second term for the others
//! ```
//!
//! At l = o the slope of the penalty is 0.
//!
//! ## Knobs
//!
//! * `kl_cov_ratio`: share of active tokens that have the penalty.
//! * `ppo_kl_coef`: weight of the penalty. verl's configuration has 0.1, the documentation of its function says 1.
//! * `epsilon_low`, `epsilon_high` have no effect; `delta` and `clip_ratio_c` are refused.
//! * The selection needs all tokens of the step, as in [clip_cov](super::clip_cov).
//!
//! ```yaml
//! semantics: verl
//! loss_type: kl_cov
//! kl_cov_ratio: 0.002
//! ppo_kl_coef: 1.0
//! ```

use super::covariance::{covariances, share_of};
use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::batch::TokenBatch;
use crate::batch::{PolicyValues, TokenFactors};
use crate::config::LossConfig;
use crate::config::checks::{finite, positive};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The loss `kl_cov`.
#[derive(Clone, Copy, Debug)]
pub struct KlCov;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::kl_cov();
/// config.parameters.kl_cov.ppo_kl_coef = 0.2;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// `kl_cov_ratio`: share of tokens that have the penalty. Above 0.
    #[serde(rename = "kl_cov_ratio")]
    #[default(2e-4)]
    pub ratio: f64,
    /// Weight of the penalty |logp - old_logp|.
    #[default(0.1)]
    pub ppo_kl_coef: f64,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        finite("ppo_kl_coef", self.ppo_kl_coef)?;
        positive("kl_cov_ratio", self.ratio)
    }
}

impl Loss for KlCov {
    const TRAITS: LossTraits = LossTraits { chooses_tokens: true, ..LossTraits::UNCLIPPED };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let coefficient = ratio.log.constant(config.parameters.kl_cov.ppo_kl_coef);
        let penalty = terms.kl_cov_mask.clone() * coefficient * ratio.log.abs();
        PolicyTerm::unclipped(penalty - ratio.value.clone() * terms.advantage.clone())
    }

    fn choose(&self, config: &LossConfig, batch: &TokenBatch, policy: &PolicyValues, factors: &mut TokenFactors) {
        let mut ranked: Vec<(usize, f64)> =
            batch.active_rows().iter().copied().zip(covariances(batch, policy)).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let chosen = ranked.into_iter().take(share_of(batch.active_tokens(), config.parameters.kl_cov.ratio));
        chosen.for_each(|(row, _)| factors.kl_cov_mask[row] = 1.0);
    }
}
