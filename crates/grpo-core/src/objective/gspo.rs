//! # gspo
//!
//! One ratio for each sequence, the geometric mean of its tokens' ratios, with PPO's clip.
//!
//! ## Formula
//!
//! ```text
//! s = e^( mean over active tokens of (l_t - o_t) )
//! P = -min( min(s, delta) A,  clip(s, 1 - epsilon_low, 1 + epsilon_high) A )      for every token of the sequence
//! loss = 1/B Σ_b P_b
//! ```
//!
//! It is [grpo](super::grpo) with `importance_sampling_level: sequence`. Under `semantics: verl` the level is
//! `sequence_token`: the value of s, held below e^10, with the token's own gradient, s_t = e^(l_t - sg(l_t) + sg(log
//! s)).
//!
//! ## Gradient
//!
//! ```text
//! sequence:        dL/dl_t = -A s (Σ_u w_u) / |y|     where s is not clipped, else 0;  w: weights of the average
//! sequence_token:  dL/dl_t = -A s w_t
//! ```
//!
//! With one advantage per sequence and weights that are equal within it the two agree; with advantages per token, or a
//! sampler's weight per token, they do not.
//!
//! ## Where it comes from
//!
//! GSPO, arXiv 2507.18071. Presets: `configs/loss/trl-gspo.yaml`, `configs/loss/verl-gspo.yaml`. verl 0.9's default
//! average is token-mean; the paper's is seq-mean-token-mean.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: the paper has 3e-4 and 4e-4. A mean of log-ratios varies far less than one of
//!   them, so grpo's 0.2 hardly ever clips.
//! * `importance_sampling_level`: `token` contradicts the name and is refused; verl has no such key and one gspo:
//!   there it is not read.
//! * `delta`, `clip_ratio_c`: as [grpo](super::grpo), on s; verl hands `clip_ratio_c` to every loss, and this one does
//!   not read it there.
//!
//! ## When to use it
//!
//! Mixture-of-experts models and long answers, where ratios of single tokens are noise. Not where credit differs
//! within a sequence: all its tokens are clipped together.
//!
//! ```yaml
//! loss_type: gspo
//! epsilon_low: 0.0003
//! epsilon_high: 0.0004
//! ```

use super::loss::{Average, Loss};
use crate::config::{ImportanceSamplingLevel, LossConfig, Semantics};
use crate::error::{Error, Result};

/// The loss `gspo`.
#[derive(Clone, Copy, Debug)]
pub struct Gspo;

impl Loss for Gspo {
    fn level(&self, config: &LossConfig) -> ImportanceSamplingLevel {
        match config.semantics {
            // verl has no such key, and one gspo.
            Semantics::Verl => ImportanceSamplingLevel::SequenceToken,
            _ => config.importance_sampling_level.unwrap_or(ImportanceSamplingLevel::Sequence),
        }
    }

    fn average(&self, _: &LossConfig) -> Average {
        Average::Sequences
    }

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.level() {
            ImportanceSamplingLevel::Token => Err(Error::Config(
                "gspo is defined by its sequence-level ratio: leave importance_sampling_level out, set it to \
                 `sequence`, or use loss_type grpo"
                    .into(),
            )),
            _ => Ok(()),
        }
    }
}
