//! # dr_grpo
//!
//! The clipped ratio of [grpo](super::grpo), divided by a constant length: the weight of a token does not depend on the length of its
//! answer.
//!
//! **When to use it.** If answers grow longer without improving under [grpo](super::grpo). The gradient is proportional to the
//! share of the limit that is used, so a learning rate of grpo does not carry over.
//!
//! **Source.** Dr. GRPO, arXiv 2503.20783. Preset: `configs/loss/trl-dr-grpo.yaml`. verl:
//! `loss_agg_mode: seq-mean-token-sum-norm` with `loss_scale_factor`.
//!
//! ## Formula
//!
//! ```text
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/(B max_completion_length) Σ P_t
//! ```
//!
//! As in [grpo](super::grpo): -A r_t if the token is not clipped, else 0; times the weight.
//!
//! ## Knobs
//!
//! * `max_completion_length`: the constant, in tokens: the generation limit. It has no default, because it decides the
//!   size of the gradient.
//! * The other keys are the same as for [grpo](super::grpo).
//!
//! The paper also omits the division by the standard deviation in the advantages; that is an option of the advantage estimator, not
//! of this loss.
//!
//! ```yaml
//! loss_type: dr_grpo
//! max_completion_length: 4096
//! ```

use super::loss::{Average, Loss, LossTraits};
use crate::config::LossConfig;
use crate::error::{Error, Result};

/// The loss `dr_grpo`.
#[derive(Clone, Copy, Debug)]
pub struct DrGrpo;

impl Loss for DrGrpo {
    const TRAITS: LossTraits =
        LossTraits { average: Average::ConstantLength, names_average: Some("vanilla"), ..LossTraits::PPO };

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.max_completion_length {
            Some(_) => Ok(()),
            None => Err(Error::of_key(
                "max_completion_length",
                "dr_grpo divides by a constant length: set max_completion_length to the generation limit in tokens",
            )),
        }
    }
}
