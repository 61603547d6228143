//! # cfpo
//!
//! The ratio with a quadratic penalty instead of a clip: its gradient shrinks as the ratio moves away from 1 and changes sign at the
//! distance epsilon.
//!
//! **When to use it.** Several updates per batch, if a clip leaves many tokens without a gradient. The penalty grows with the
//! square of the ratio, so single tokens that move very far dominate the loss.
//!
//! **Source.** CFPO, arXiv 2601.22801; SPO, arXiv 2401.16025, has the same objective. The paper replaces the clip of
//! [grpo](super::grpo) and keeps its average. Preset: `configs/loss/cfpo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! P_t = -( r_t A - |A| / (2 epsilon) (r_t - 1)^2 )        epsilon: epsilon_low
//!
//! dP_t/dl_t = -r_t ( A - |A| (r_t - 1) / epsilon )
//! ```
//!
//! The gradient is 0 at r = 1 + epsilon for A > 0 and at r = 1 - epsilon for A < 0, where a clip begins. Beyond that point it pulls the
//! ratio back.
//!
//! ## Knobs
//!
//! * `epsilon_low`: distance from 1 at which the gradient changes sign. Above 0. Leave `epsilon_high` out or set it to the same value.
//! * `importance_sampling_level: sequence` uses the sequence's ratio.
//! * `delta` and `clip_ratio_c` are refused.
//!
//! ```yaml
//! loss_type: cfpo
//! epsilon_low: 0.2
//! ```

use super::loss::{Average, Clip, Loss, LossTraits};
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
    const TRAITS: LossTraits = LossTraits { clip: Clip::None, average: Average::Sequences, ..LossTraits::PPO };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        // A smaller bound than for a plain ratio, so that the square stays finite.
        let ratio = held(&ratio.log, true).exp();
        let away = ratio.clone() - ratio.constant(1.0);
        let steepness = terms.advantage.abs() * ratio.constant(0.5 / config.lower_epsilon());
        PolicyTerm::unclipped(steepness * away.clone() * away - ratio * terms.advantage.clone())
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        let low = config.lower_epsilon();
        positive("epsilon_low of cfpo", low)?;
        match config.epsilon_high.filter(|high| *high != low) {
            Some(high) => Err(Error::of_key(
                "epsilon_high",
                format!("cfpo uses one distance from 1, epsilon_low ({low}): leave epsilon_high ({high}) out"),
            )),
            None => Ok(()),
        }
    }
}
