//! # dro
//!
//! Policy gradient with a quadratic penalty on the log-ratio.
//!
//! **When to use it.** Offline or strongly off-policy data with reliable old log-probabilities: the penalty has a gradient
//! everywhere.
//!
//! **Source.** DRO, arXiv 2405.19107. verl's `loss_mode: dro`. Averaged over the step's tokens.
//!
//! ## Formula
//!
//! ```text
//! P_t = -( A l_t - dro_beta / 2 (l_t - o_t)^2 )
//!
//! dP_t/dl_t = -A + dro_beta (l_t - o_t)
//! ```
//!
//! The penalty grows with the distance: the minimum is at l = o + A / dro_beta.
//!
//! ## Knobs
//!
//! * `dro_beta`: weight of the penalty; it has no default.
//! * `epsilon_low`, `epsilon_high` have no effect; `delta` and `clip_ratio_c` are refused.
//!
//! ```yaml
//! loss_type: dro
//! dro_beta: 0.5
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;
use crate::config::checks::positive;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The loss `dro`.
#[derive(Clone, Copy, Debug)]
pub struct Dro;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::dro();
/// assert!(config.validate().is_err(), "its weight has no default");
/// config.parameters.dro.beta = Some(0.5);
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// `dro_beta`: weight of the quadratic penalty. Above 0; it has no default.
    #[serde(rename = "dro_beta")]
    pub beta: Option<f64>,
}

impl Parameters {
    pub(super) fn check(&self) -> Result<()> {
        positive("dro_beta", self.beta)
    }
}

impl Loss for Dro {
    const TRAITS: LossTraits = LossTraits::UNCLIPPED;

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let half = ratio.log.constant(0.5 * config.parameters.dro.beta.unwrap_or_default());
        let penalty = half * ratio.log.clone() * ratio.log.clone();
        PolicyTerm::unclipped(penalty - terms.advantage.clone() * terms.logp.clone())
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.parameters.dro.beta {
            Some(_) => Ok(()),
            None => {
                Err(Error::of_key("dro_beta", "dro weighs its penalty with dro_beta, which has no default: set it"))
            }
        }
    }
}
