//! # sapo
//!
//! A smooth gate on the ratio instead of a clip: the gradient decreases with the distance from 1 and is never cut off.
//!
//! **When to use it.** Off-policy steps in which a hard clip would discard many tokens. Only the gate limits the policy's
//! movement; the ratio has no bound.
//!
//! **Source.** SAPO, arXiv 2511.20347. Averaged as [grpo](super::grpo). verl averages the policy term in this way under every
//! aggregation mode, and KL and entropy according to the mode. Presets: `configs/loss/trl-sapo.yaml`,
//! `configs/loss/verl-sapo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! P_t = -(4 / tau) sigmoid( tau (r_t - 1) ) A        tau: sapo_temperature_pos for A > 0, sapo_temperature_neg for A <= 0
//!
//! dP_t/dl_t = -A 4 sigma (1 - sigma) r_t,   sigma = sigmoid( tau (r_t - 1) )
//! ```
//!
//! On-policy the gradient is -A, as without a gate.
//!
//! ## Knobs
//!
//! * `sapo_temperature_pos`, `sapo_temperature_neg`: a larger temperature reduces the gradient sooner. verl's names `tau_pos` and `tau_neg`
//!   override them if set.
//! * `importance_sampling_level: sequence` applies the gate to the sequence's ratio.
//! * `epsilon_low`, `epsilon_high` have no effect; `delta` and `clip_ratio_c` are refused.
//!
//! ```yaml
//! loss_type: sapo
//! sapo_temperature_pos: 1.0
//! sapo_temperature_neg: 1.05
//! ```

use super::loss::{Average, Clip, Loss, LossTraits, OwnAverage};
use super::{PolicyTerm, Ratio, TokenTerms, signs};
use crate::backend_api::real::Real;
use crate::config::checks::positive;
use crate::config::{LossAggMode, LossConfig};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The loss `sapo`.
#[derive(Clone, Copy, Debug)]
pub struct Sapo;

/// Keys of this loss.
///
/// ```
/// use grpo_core::LossConfig;
///
/// let mut config = LossConfig::sapo();
/// config.parameters.sapo.temperature_neg = 1.2;
/// config.validate()?;
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parameters {
    /// `sapo_temperature_pos`: temperature of the gate for positive advantages. Above 0.
    #[serde(rename = "sapo_temperature_pos")]
    #[default(1.0)]
    pub temperature_pos: f64,
    /// `sapo_temperature_neg`: temperature of the gate for advantages of 0 and below. Above 0.
    #[serde(rename = "sapo_temperature_neg")]
    #[default(1.05)]
    pub temperature_neg: f64,
    /// verl's name of `sapo_temperature_pos`, which it overrides.
    pub tau_pos: Option<f64>,
    /// verl's name of `sapo_temperature_neg`, which it overrides.
    pub tau_neg: Option<f64>,
}

impl Parameters {
    /// Returns the temperatures for positive and for other advantages, from either pair of names.
    pub fn temperatures(&self) -> (f64, f64) {
        (self.tau_pos.unwrap_or(self.temperature_pos), self.tau_neg.unwrap_or(self.temperature_neg))
    }

    pub(super) fn check(&self) -> Result<()> {
        positive("sapo_temperature_pos", self.temperature_pos)?;
        positive("sapo_temperature_neg", self.temperature_neg)?;
        positive("tau_pos", self.tau_pos)?;
        positive("tau_neg", self.tau_neg)
    }
}

impl Loss for Sapo {
    const TRAITS: LossTraits = LossTraits {
        clip: Clip::None,
        verl_log_ratio_guard: Some(super::vanilla::LOG_RATIO_GUARD),
        average: Average::Sequences,
        verl_average: Some(OwnAverage::Mode(LossAggMode::SeqMeanTokenMean)),
        ..LossTraits::PPO
    };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let ratio = &ratio.value;
        let (_, positive) = signs(&terms.advantage);
        let (tau_pos, tau_neg) = config.parameters.sapo.temperatures();
        let gate = |tau: f64| {
            let tau = ratio.constant(tau);
            (tau.clone() * (ratio.clone() - ratio.constant(1.0))).sigmoid() * (ratio.constant(4.0) / tau)
        };
        let gate = R::select(&positive, &gate(tau_pos), &gate(tau_neg));
        PolicyTerm::unclipped(-(gate * terms.advantage.clone()))
    }
}
