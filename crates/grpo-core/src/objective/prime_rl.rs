//! # prime_rl
//!
//! The ratio within a trust region of the token's probability, and a quadratic pull towards the sampler.
//!
//! ## Formula
//!
//! ```text
//! P_t = -keep adv_tau A r_t + kl_tau (l_t - o_t)^2
//! ```
//!
//! keep is 0 where the probability has risen by more than `epsilon_high` and A > 0, or fallen by more than
//! `epsilon_low` and A is not; else 1. o is the sampler's log-probability: hand it over as `old_logp`. Tokens that are
//! not kept pay the penalty all the same.
//!
//! ## Gradient
//!
//! ```text
//! dP_t/dl_t = -keep adv_tau A r_t + 2 kl_tau (l_t - o_t)
//! ```
//!
//! ## Where it comes from
//!
//! prime-rl's loss `default` until 2026-08-27, when [ipo](super::ipo) replaced it (#3418). The trust region comes from
//! [dppo_tv](super::dppo_tv) (DPPO, arXiv 2602.04879), the penalty from Kimi. Averaged over the step's tokens, as in prime-rl.
//!
//! Keys and defaults are the same as for [ipo](super::ipo): prime-rl's values of 2026-09-18. prime-rl ran this loss with a region of
//! 0.2 and a `kl_tau` of 0.001: `configs/loss/prime-rl-dppo.yaml`.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: prime-rl's `dppo_mask_low`, `dppo_mask_high`; 0.3 unless set.
//! * `adv_tau`: what multiplies the advantage, 1.
//! * `kl_tau`: weight of the penalty; 0, which is off.
//! * `delta` and `clip_ratio_c` are refused (verl hands `clip_ratio_c` to every loss: there it is accepted and not
//!   read).
//!
//! ## When to use it
//!
//! Asynchronous training, where the sampler is some steps behind: the ratio corrects, the region stops what runs away,
//! the penalty brings it back.
//!
//! ```yaml
//! loss_type: prime_rl
//! epsilon_low: 0.2
//! kl_tau: 0.001
//! ```

use super::loss::{Bounds, Loss};
use super::{PolicyTerm, Ratio, TokenTerms, signs, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;
use crate::config::checks::finite;
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// The loss `prime_rl`.
#[derive(Clone, Copy, Debug)]
pub struct PrimeRl;

/// Its keys, which are those of [`ipo`](super::ipo) too.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::prime_rl();
/// config.parameters.prime_rl.kl_tau = 0.01;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// What multiplies the advantage.
    pub adv_tau: f64,
    /// Weight of the quadratic penalty on the log-ratio. 0 is off, as in prime-rl since 2026-09-18.
    pub kl_tau: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { adv_tau: 1.0, kl_tau: 0.0 }
    }
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

    fn bounds(&self, config: &LossConfig) -> Bounds {
        trust_region::bounds(config)
    }

    fn default_epsilon(&self) -> f64 {
        EPSILON
    }

    fn is_of_tokens_only(&self) -> bool {
        true
    }
}
