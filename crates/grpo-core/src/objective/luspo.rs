//! # luspo
//!
//! The sequence's ratio of [gspo](super::gspo), with the loss summed over the tokens of a sequence: a sequence weighs
//! by its length.
//!
//! ## Formula
//!
//! ```text
//! s = e^( mean over active tokens of (l_t - o_t) )
//! P_t = -min( min(s, delta) A,  clip(s, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/B Σ_b Σ_t P_t
//! ```
//!
//! ## Gradient
//!
//! ```text
//! dL/dl_t = -A s / B     where s is not clipped, else 0
//! ```
//!
//! gspo's 1/|y| is undone by the sum: long answers are no longer held back.
//!
//! ## Where it comes from
//!
//! LUSPO, arXiv 2602.05261. Preset: `configs/loss/trl-luspo.yaml`. verl says it with `loss_type: gspo` and
//! `loss_agg_mode: seq-mean-token-sum`; `luspo` is refused there. Liger 0.8.5 multiplies the loss by the sequence's
//! length, which is the same only at sequence level without KL.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: the paper has 2e-3 and 2.5e-3.
//! * `importance_sampling_level`: `sequence` is the default here. TRL's is `token`, about which it warns; ask for it
//!   if you mean it.
//!
//! ## When to use it
//!
//! Where answers get shorter under [gspo](super::gspo) although they should not. The loss grows with length, so
//! learning rates do not carry over from gspo.
//!
//! ```yaml
//! loss_type: luspo
//! epsilon_low: 0.002
//! epsilon_high: 0.0025
//! ```

use super::loss::{Average, Loss};
use crate::config::{ImportanceSamplingLevel, LossConfig};

/// The loss `luspo`.
#[derive(Clone, Copy, Debug)]
pub struct Luspo;

impl Loss for Luspo {
    fn level(&self, config: &LossConfig) -> ImportanceSamplingLevel {
        config.importance_sampling_level.unwrap_or(ImportanceSamplingLevel::Sequence)
    }

    fn average(&self, _: &LossConfig) -> Average {
        Average::SequenceSums
    }

    fn names_average(&self) -> Option<&'static str> {
        Some("gspo")
    }
}
