//! # luspo
//!
//! The sequence-level ratio of [gspo](super::gspo), with the loss summed over the tokens of a sequence: the weight of a sequence is
//! its length.
//!
//! **When to use it.** If answers get shorter under [gspo](super::gspo) although they should not. The loss grows with length, so
//! learning rates of gspo do not carry over.
//!
//! **Source.** LUSPO, arXiv 2602.05261. Preset: `configs/loss/trl-luspo.yaml`. verl's equivalent is `loss_type: gspo` with
//! `loss_agg_mode: seq-mean-token-sum`; `luspo` is refused under `semantics: verl`. Liger 0.8.5 multiplies the loss by the
//! sequence's length, which is equivalent only at sequence level without KL.
//!
//! ## Formula
//!
//! ```text
//! s = e^( mean over active tokens of (l_t - o_t) )
//! P_t = -min( min(s, delta) A,  clip(s, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/B Σ_b Σ_t P_t
//!
//! dL/dl_t = -A s / B     if s is not clipped, else 0
//! ```
//!
//! The sum cancels gspo's 1/|y|, so long answers are not down-weighted.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: the paper uses 2e-3 and 2.5e-3.
//! * `importance_sampling_level`: default `sequence`. TRL's default is `token`, about which TRL warns; set `token` to reproduce it.
//!
//! ```yaml
//! loss_type: luspo
//! epsilon_low: 0.002
//! epsilon_high: 0.0025
//! ```

use super::loss::{Average, Loss, LossTraits};
use crate::config::ImportanceSamplingLevel;

/// The loss `luspo`.
#[derive(Clone, Copy, Debug)]
pub struct Luspo;

impl Loss for Luspo {
    const TRAITS: LossTraits = LossTraits {
        level: ImportanceSamplingLevel::Sequence,
        average: Average::SequenceSums,
        names_average: Some("gspo"),
        ..LossTraits::PPO
    };
}
