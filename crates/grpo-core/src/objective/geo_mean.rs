//! # geo_mean
//!
//! GMPO: the geometric mean of the tokens' clipped ratios. `gmpo` is an alias.
//!
//! **When to use it.** As for [gspo](super::gspo), with a clip per token: one outlier cannot move the whole sequence.
//!
//! **Source.** GMPO, arXiv 2507.20673. Presets: `configs/loss/trl-gmpo.yaml` (`trl.experimental.gmpo`),
//! `configs/loss/verl-gmpo.yaml` (`loss_mode: geo_mean`).
//!
//! ## Formula
//!
//! ```text
//! c_t = min(l_t - o_t, epsilon_high)    for A > 0
//! c_t = max(l_t - o_t, -epsilon_low)    for A < 0
//! c_t = 0                               for A = 0
//! P = -e^( mean over active tokens of c_t ) A         for every token of the sequence
//! loss = 1/B Σ_b P_b
//!
//! dL/dl_t = -A e^(mean c) / (B |y|)     where the token is not clipped, else 0
//! ```
//!
//! The epsilons bound the log-ratio, not the ratio. With advantages per token, A is their mean over the sequence, and each c_t uses the
//! advantage of its own token (verl).
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: 0.4 in the paper and in TRL's GMPO; the default here is the common 0.2.
//! * `count_masked_rows`: verl divides by all rows, including fully masked ones; the default under both semantics does the same.
//! * `top_entropy_quantile`: tokens of lower entropy are excluded from the mean of c_t and its count (TRL's GMPO).
//! * `importance_sampling_level` is ignored. `delta`, `clip_ratio_c`, and `use_bias_correction_kl: true` with a KL term are refused; under
//!   TRL's semantics the last one is ignored.
//! * The sampler's weight has one value per sequence, e^(mean of log(weight + 1e-10)), as in verl. TRL's GMPO has no
//!   sampler correction, so the correction is off by default.
//!
//! TRL's GMPO counts a fully masked row as a ratio of 1 and adds -A, without a gradient, to the loss value; here such a row adds 0.
//!
//! ```yaml
//! loss_type: geo_mean
//! epsilon_low: 0.4
//! epsilon_high: 0.4
//! ```

use super::loss::{Average, Clip, Loss, LossTraits, OwnAverage, SharedLogRatio};
use super::ratio::held;
use super::{PolicyTerm, Ratio, TokenTerms, signs};
use crate::backend_api::real::Real;
use crate::config::{KlImportance, LossConfig};
use crate::error::{Error, Result};

/// The loss `geo_mean`.
#[derive(Clone, Copy, Debug)]
pub struct GeoMean;

impl Loss for GeoMean {
    const TRAITS: LossTraits = LossTraits {
        clip: Clip::LogRatio,
        shared_log_ratio: Some(SharedLogRatio::Mean),
        is_of_sequences: true,
        // TRL's GMPO has no sampler correction, and accepts use_bias_correction_kl but ignores it.
        trl_corrects_sampler: false,
        trl_reads_kl_bias_correction: false,
        largest_epsilon_low: f64::INFINITY,
        average: Average::Sequences,
        verl_average: Some(OwnAverage::AllRows),
        ..LossTraits::PPO
    };

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

    /// Returns the log-ratio, clipped in the direction of the token's advantage.
    fn shared_part<R: Real>(&self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
        let own = logp.clone() - old_logp.clone();
        let zero = advantage.constant(0.0);
        let (low, high) = (own.constant(-config.lower_epsilon()), own.constant(config.upper_epsilon()));
        let falling = R::select(&advantage.lt(&zero), &own.max(&low), &zero.or_nan_of(&own));
        R::select(&zero.lt(advantage), &own.min(&high), &falling)
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.beta != 0.0 && config.kl_importance() == KlImportance::Ratio {
            true => Err(Error::of_key(
                "use_bias_correction_kl",
                "use_bias_correction_kl multiplies the KL term by the loss's ratio, but geo_mean has no ratio: leave it \
                 out, or set kl_importance to `score_function` or `sampler`",
            )),
            false => Ok(()),
        }
    }
}
