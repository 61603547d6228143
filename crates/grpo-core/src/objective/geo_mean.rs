//! # geo_mean
//!
//! GMPO: the geometric mean of the tokens' ratios, each clipped before. `gmpo` is another name.
//!
//! ## Formula
//!
//! ```text
//! c_t = min(l_t - o_t, epsilon_high)    for A > 0
//! c_t = max(l_t - o_t, -epsilon_low)    for A < 0
//! c_t = 0                               for A = 0
//! P = -e^( mean over active tokens of c_t ) A         for every token of the sequence
//! loss = 1/B Σ_b P_b
//! ```
//!
//! The epsilons bound the log-ratio, not the ratio. With advantages per token, A is their mean over the sequence and
//! each c_t goes by its token's own (verl).
//!
//! ## Gradient
//!
//! ```text
//! dL/dl_t = -A e^(mean c) / (B |y|)     where the token is not clipped, else 0
//! ```
//!
//! ## Where it comes from
//!
//! GMPO, arXiv 2507.20673. Presets: `configs/loss/trl-gmpo.yaml` (`trl.experimental.gmpo`),
//! `configs/loss/verl-gmpo.yaml` (`loss_mode: geo_mean`).
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: 0.4 in the paper and in TRL's GMPO; our default is the common 0.2.
//! * `count_masked_rows`: verl divides by all rows here, also the fully masked ones; so do both systems' defaults.
//! * `top_entropy_quantile`: tokens of lower entropy leave the mean of c_t and its count (TRL's GMPO).
//! * `importance_sampling_level` is not read. Refused: `delta`; outside of verl, which hands it to every loss,
//!   `clip_ratio_c`; outside of TRL, whose GMPO does not read it, `use_bias_correction_kl: true` with a KL term.
//! * A sampler's weight is one for the sequence: e^(mean of log(weight + 1e-10)), as verl has it. TRL's GMPO knows no
//!   sampler, so it is off unless asked for.
//!
//! TRL's GMPO counts a fully masked row as a ratio of 1 and adds -A to the loss value, without a gradient; here it
//! adds 0.
//!
//! ## When to use it
//!
//! As [gspo](super::gspo), with a clip that still tells tokens apart: one outlier cannot move the whole sequence.
//!
//! ```yaml
//! loss_type: geo_mean
//! epsilon_low: 0.4
//! epsilon_high: 0.4
//! ```

use super::loss::{Average, Bounds, Loss, OwnAverage, SharedLogRatio};
use super::ratio::held;
use super::{PolicyTerm, Ratio, TokenTerms, signs};
use crate::backend_api::real::Real;
use crate::config::{ImportanceSamplingLevel, KlImportance, LossConfig, Semantics};
use crate::error::{Error, Result};

/// The loss `geo_mean`.
#[derive(Clone, Copy, Debug)]
pub struct GeoMean;

impl Loss for GeoMean {
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, _: &Ratio<R>) -> PolicyTerm<R> {
        let own = terms.logp.clone() - terms.old_logp.clone();
        let (negative, positive) = signs(&terms.advantage);
        let below = own.lt(&own.constant(-config.lower_epsilon()));
        let above = own.constant(config.upper_epsilon()).lt(&own);
        let mean = terms.shared.clone().unwrap_or_else(|| own.clone());
        PolicyTerm {
            low_clipped: own.indicator(&R::and(&below, &negative)),
            high_clipped: own.indicator(&R::and(&above, &positive)),
            ..PolicyTerm::unclipped(-(held(&mean, false).exp() * terms.advantage.clone()))
        }
    }

    /// The log-ratio, clipped in the direction of the token's advantage.
    fn shared_part<R: Real>(&self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
        let own = logp.clone() - old_logp.clone();
        let zero = advantage.constant(0.0);
        let (low, high) = (own.constant(-config.lower_epsilon()), own.constant(config.upper_epsilon()));
        let falling = R::select(&advantage.lt(&zero), &own.max(&low), &zero.or_nan_of(&own));
        R::select(&zero.lt(advantage), &own.min(&high), &falling)
    }

    fn bounds(&self, config: &LossConfig) -> Bounds {
        Bounds::LogRatio { low: -config.lower_epsilon(), high: config.upper_epsilon() }
    }

    fn level(&self, _: &LossConfig) -> ImportanceSamplingLevel {
        // It takes the ratio of a sequence in its own way, and does not read the key.
        ImportanceSamplingLevel::Token
    }

    fn shared_log_ratio(&self) -> Option<SharedLogRatio> {
        Some(SharedLogRatio::Mean)
    }

    fn is_of_sequences(&self) -> bool {
        true
    }

    fn reads_kl_bias_correction(&self, semantics: Semantics) -> bool {
        // TRL's GMPO has use_bias_correction_kl, and does not read it.
        semantics != Semantics::Trl
    }

    fn corrects_sampler_by_default(&self) -> bool {
        // TRL's GMPO knows no sampler.
        false
    }

    fn largest_epsilon_low(&self) -> f64 {
        f64::INFINITY
    }

    fn average(&self, _: &LossConfig) -> Average {
        Average::Sequences
    }

    fn own_average(&self, semantics: Semantics) -> Option<OwnAverage> {
        (semantics == Semantics::Verl).then_some(OwnAverage::AllRows)
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.beta != 0.0 && config.kl_importance() == KlImportance::Ratio {
            true => Err(Error::Config(
                "use_bias_correction_kl multiplies the KL term by the loss's ratio, which geo_mean has none of: leave it \
                 out, or set kl_importance to `score_function` or `sampler`"
                    .into(),
            )),
            false => Ok(()),
        }
    }
}
