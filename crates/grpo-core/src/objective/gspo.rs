//! # gspo
//!
//! One ratio per sequence, the geometric mean of its tokens' ratios, with PPO's clip.
//!
//! **When to use it.** Mixture-of-experts models and long answers, in which ratios of single tokens are noisy. Not for credit
//! that differs within a sequence, because all its tokens are clipped together.
//!
//! **Source.** GSPO, arXiv 2507.18071. Presets: `configs/loss/trl-gspo.yaml`, `configs/loss/verl-gspo.yaml`. verl 0.9's default
//! average is token-mean; the paper's is seq-mean-token-mean.
//!
//! ## Formula
//!
//! ```text
//! s = e^( mean over active tokens of (l_t - o_t) )
//! P = -min( min(s, delta) A,  clip(s, 1 - epsilon_low, 1 + epsilon_high) A )      for every token of the sequence
//! loss = 1/B Σ_b P_b
//!
//! sequence:        dL/dl_t = -A s (Σ_u w_u) / |y|     if s is not clipped, else 0;  w: weights of the average
//! sequence_token:  dL/dl_t = -A s w_t
//! ```
//!
//! This is [grpo](super::grpo) with `importance_sampling_level: sequence`. Under `semantics: verl` the level is
//! `sequence_token`: the value of s, capped at e^10, with the token's own gradient, s_t = e^(l_t - sg(l_t) + sg(log s)).
//!
//! The two gradients agree if the advantage and the weights are constant within a sequence. They differ for advantages per token or a
//! sampler weight per token.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: the paper uses 3e-4 and 4e-4. A mean of log-ratios varies far less than a single
//!   log-ratio, so grpo's 0.2 hardly ever clips.
//! * `importance_sampling_level`: `token` contradicts the definition and is refused. Under `semantics: verl` the key is ignored, because
//!   verl has no such key and only one gspo.
//! * `delta`, `clip_ratio_c`: as in [grpo](super::grpo), applied to s.
//!
//! ```yaml
//! loss_type: gspo
//! epsilon_low: 0.0003
//! epsilon_high: 0.0004
//! ```

use super::loss::{Average, Loss, LossTraits};
use crate::config::{ImportanceSamplingLevel, LossConfig};
use crate::error::{Error, Result};

/// The loss `gspo`.
#[derive(Clone, Copy, Debug)]
pub struct Gspo;

impl Loss for Gspo {
    const TRAITS: LossTraits = LossTraits {
        level: ImportanceSamplingLevel::Sequence,
        // verl has only this gspo.
        verl_level: Some(ImportanceSamplingLevel::SequenceToken),
        average: Average::Sequences,
        ..LossTraits::PPO
    };

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.level() {
            ImportanceSamplingLevel::Token => Err(Error::of_key(
                "importance_sampling_level",
                "gspo is defined by its sequence-level ratio: leave importance_sampling_level out, set it to \
                 `sequence`, or use loss_type grpo",
            )),
            _ => Ok(()),
        }
    }
}
