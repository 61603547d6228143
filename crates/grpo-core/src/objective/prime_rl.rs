//! # prime_rl
//!
//! The ratio with a trust region on the token's probability, and a quadratic penalty on the distance to the sampler.
//!
//! **When to use it.** Asynchronous training, in which the sampler is some steps behind the policy: the ratio corrects for the
//! sampler, the region stops tokens that have moved too far, and the penalty pulls them back.
//!
//! **Source.** prime-rl's loss `default` until 2026-08-27, when [ipo](super::ipo) replaced it (#3418). The trust region comes
//! from [dppo_tv](super::dppo_tv) (DPPO, arXiv 2602.04879), the penalty from Kimi. Averaged over the step's tokens, as in
//! prime-rl.
//!
//! Keys and defaults are the same as for [ipo](super::ipo): prime-rl's values of 2026-09-18. prime-rl itself ran this loss with a
//! region of 0.2 and a `kl_tau` of 0.001: `configs/loss/prime-rl-dppo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! P_t = -keep adv_tau A r_t + kl_tau (l_t - o_t)^2
//!
//! dP_t/dl_t = -keep adv_tau A r_t + 2 kl_tau (l_t - o_t)
//! ```
//!
//! keep is 0 if A > 0 and the probability has risen by more than `epsilon_high`, or if A <= 0 and it has fallen by more than
//! `epsilon_low`; else 1. o is the sampler's log-probability: pass it as `old_logp`. Tokens with keep = 0 still pay the penalty.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: prime-rl's `dppo_mask_low`, `dppo_mask_high`; default 0.3.
//! * `adv_tau`: factor of the advantage; default 1.
//! * `kl_tau`: weight of the penalty; default 0, which turns it off.
//! * `delta` and `clip_ratio_c` are refused.
//!
//! ```yaml
//! loss_type: prime_rl
//! epsilon_low: 0.2
//! kl_tau: 0.001
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms, signs, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;
use crate::config::checks::finite;
use crate::error::Result;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The loss `prime_rl`.
#[derive(Clone, Copy, Debug)]
pub struct PrimeRl;

/// Keys of this loss and of [`ipo`](super::ipo).
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::prime_rl();
/// config.parameters.prime_rl.kl_tau = 0.01;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// Factor of the advantage.
    #[default(1.0)]
    pub adv_tau: f64,
    /// Weight of the quadratic penalty on the log-ratio; 0 turns it off, as in prime-rl since 2026-09-18.
    pub kl_tau: f64,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        finite("adv_tau", self.adv_tau)?;
        finite("kl_tau", self.kl_tau)
    }
}

/// `eps` of prime-rl's IPOLossConfig since 2026-09-18 (#3586).
pub(super) const EPSILON: f64 = 0.3;

impl Loss for PrimeRl {
    const TRAITS: LossTraits = LossTraits { epsilon: EPSILON, ..trust_region::TRAITS };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let (too_high, too_low) = trust_region::has_moved(config, terms);
        let (_, positive) = signs(&terms.advantage);
        let one = |is: &R::Bool| terms.logp.indicator(is);
        let outside = trust_region::Outside {
            high: one(&R::and(&too_high, &positive)),
            low: one(&R::and(&too_low, &R::not(&positive))),
        };
        trust_region::penalised(config, terms, ratio, outside)
    }
}
