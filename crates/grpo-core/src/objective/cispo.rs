//! # cispo
//!
//! The bounded, detached ratio weights the log-probability, so no token loses its gradient.
//!
//! **When to use it.** Off-policy steps with rare, decisive tokens ("wait", "however") that a clip would leave without a
//! gradient. The bound is the only limit on the update: keep it low or add a KL term if the policy diverges.
//!
//! **Source.** MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786, uses a bound of 5. Under TRL's semantics averaged as
//! [dapo](super::dapo). Presets: `configs/loss/trl-cispo.yaml`, `configs/loss/verl-cispo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! TRL:   P_t = -sg( min(r_t, epsilon_high) ) A l_t
//! verl:  P_t = -sg( clip(r_t, 1 - epsilon_low, 1 + epsilon_high) ) A l_t
//!
//! dP_t/dl_t = -A x (bounded ratio)
//! ```
//!
//! sg: stop_gradient. `epsilon_high` is a bound of the ratio itself in TRL and a distance from 1 in verl; `semantics` selects the
//! meaning. TRL's form ignores `epsilon_low`.
//!
//! verl's log-ratio guard clamps only the weight, because the ratio is detached; the gradient remains.
//!
//! ## Knobs
//!
//! * `epsilon_high`: has no default under TRL's semantics, because the 0.2 of [grpo](super::grpo) would cap every ratio at 0.2.
//! * `epsilon_low`: verl only; 1 or more means no lower bound (verl's recipe writes 10).
//! * `delta` and `clip_ratio_c` are refused, because the bound holds for both signs of the advantage.
//! * `importance_sampling_level: sequence` uses the sequence's ratio as the weight.
//!
//! ```yaml
//! loss_type: cispo
//! epsilon_high: 5.0
//! ```

use super::loss::{Average, Clip, Clipped, Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms, clip, signs};
use crate::backend_api::real::Real;
use crate::config::{LossConfig, Semantics};
use crate::error::{Error, Result};
use crate::metrics::Metrics;

/// The loss `cispo`.
#[derive(Clone, Copy, Debug)]
pub struct Cispo;

/// Returns `true` if `epsilon_high` bounds the ratio itself, as in TRL, and not its distance from 1.
fn bounds_raw_ratio(config: &LossConfig) -> bool {
    config.semantics != Semantics::Verl
}

impl Loss for Cispo {
    const TRAITS: LossTraits = LossTraits {
        clip: Clip::Weight,
        verl_log_ratio_guard: Some(super::vanilla::LOG_RATIO_GUARD),
        // verl's scripts use values above 1 for no lower bound.
        largest_epsilon_low: f64::INFINITY,
        average: Average::GenerationTokens,
        ..LossTraits::PPO
    };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let ratio = &ratio.value;
        let (low, high) = (ratio.constant(config.ratio_low()), ratio.constant(config.ratio_high()));
        let (_, positive) = signs(&terms.advantage);
        let above = high.lt(ratio);
        let (weight, below, above) = match bounds_raw_ratio(config) {
            true => (ratio.min(&high), None, R::and(&above, &positive)),
            false => (ratio.clamp(config.ratio_low(), config.ratio_high()), Some(ratio.lt(&low)), above),
        };
        let policy = -(weight.stop_gradient() * terms.advantage.clone() * terms.logp.clone());
        PolicyTerm {
            low_clipped: below.map_or(ratio.constant(0.0), |below| ratio.indicator(&below)),
            high_clipped: ratio.indicator(&above),
            ..PolicyTerm::unclipped(policy)
        }
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        match bounds_raw_ratio(config) && config.epsilon_high.is_none() {
            true => Err(Error::of_key(
                "epsilon_high",
                "cispo caps the raw ratio at epsilon_high (ScaleRL uses 5.0), so it has no default: set it, or \
                 `semantics: verl` for a bound of 1 + epsilon_high",
            )),
            false => Ok(()),
        }
    }

    fn metrics(&self, config: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
        match bounds_raw_ratio(config) {
            true => metrics.mean("cispo_clip_ratio", clipped.sums.high_clipped, clipped.count),
            false => clip::metrics(false, clipped, metrics),
        }
    }
}
