//! # cfpo
//!
//! The ratio with a quadratic penalty instead of a clip: its gradient shrinks as the ratio leaves 1 and turns back at the
//! distance epsilon.
//!
//! ## Formula
//!
//! ```text
//! P_t = -( r_t A - |A| / (2 epsilon) (r_t - 1)^2 )        epsilon: epsilon_low
//! ```
//!
//! ## Gradient
//!
//! ```text
//! dP_t/dl_t = -r_t ( A - |A| (r_t - 1) / epsilon )
//! ```
//!
//! It is 0 at r = 1 + epsilon for A > 0 and at r = 1 - epsilon for A < 0, where a clip begins, and pulls back beyond.
//!
//! ## Where it comes from
//!
//! CFPO, arXiv 2601.22801; the same objective is SPO's, arXiv 2401.16025. Averaged as [grpo](super::grpo), in which the
//! paper replaces the clip. Preset: `configs/loss/cfpo.yaml`.
//!
//! ## Knobs
//!
//! * `epsilon_low`: where the gradient turns. Above 0. There is one such distance: `epsilon_high` is left out, or the same.
//! * `importance_sampling_level: sequence` takes the sequence's ratio.
//! * `delta` and `clip_ratio_c` are refused (verl hands `clip_ratio_c` to every loss: there it is accepted and not read).
//!
//! ## When to use it
//!
//! Several updates per batch, where a clip leaves many tokens without a gradient. The penalty grows with the square of the
//! ratio: where single tokens move very far, they dominate.
//!
//! ```yaml
//! loss_type: cfpo
//! epsilon_low: 0.2
//! ```

use super::loss::{Average, Bounds, Loss};
use super::ratio::held;
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;
use crate::config::checks::positive;
use crate::error::{Error, Result};

/// The loss `cfpo`.
#[derive(Clone, Copy, Debug)]
pub struct Cfpo;

impl Loss for Cfpo {
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        // The ratio is squared, and the square has to fit.
        let ratio = held(&ratio.log, true).exp();
        let away = ratio.clone() - ratio.constant(1.0);
        let steepness = terms.advantage.abs() * ratio.constant(0.5 / config.lower_epsilon());
        PolicyTerm::unclipped(steepness * away.clone() * away - ratio * terms.advantage.clone())
    }

    fn bounds(&self, _: &LossConfig) -> Bounds {
        Bounds::None
    }

    fn average(&self, _: &LossConfig) -> Average {
        Average::Sequences
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        let low = config.lower_epsilon();
        positive("epsilon_low of cfpo", low)?;
        match config.epsilon_high.filter(|high| *high != low) {
            Some(high) => Err(Error::Config(format!(
                "cfpo turns back at one distance from 1, epsilon_low ({low}): leave epsilon_high ({high}) out"
            ))),
            None => Ok(()),
        }
    }
}
