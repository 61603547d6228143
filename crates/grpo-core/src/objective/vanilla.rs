//! # vanilla
//!
//! verl's PPO loss: the clipped ratio of [grpo](super::grpo) with a second clip for negative advantages.
//!
//! **When to use it.** To reproduce verl with any average. The dual clip and `delta` have the same effect for A < 0; one of the
//! two is enough.
//!
//! **Source.** PPO, arXiv 1707.06347; the dual clip is arXiv 1912.09729. verl's `loss_mode: vanilla`. Presets:
//! `configs/loss/verl-grpo.yaml`, `configs/loss/verl-dapo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! r_t = e^( clamp(l_t - o_t, -20, 20) )                  the guard under semantics: verl
//! P_t = -min( r_t A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! P_t = min( P_t, -A c )    for A < 0                    c = clip_ratio_c
//! loss = 1/N Σ P_t          token-mean
//!
//! dP_t/dl_t = -A r_t   if the token is not clipped, else 0
//! ```
//!
//! A token is clipped if A > 0 and r > 1 + epsilon_high; if A < 0 and r < 1 - epsilon_low or r > c; and, under verl, if its log-ratio is
//! beyond the guard.
//!
//! ## Knobs
//!
//! * `semantics`: only `verl` has this loss. Elsewhere, `loss_type: grpo` with `clip_ratio_c` is the same objective.
//! * `clip_ratio_c`: the dual clip, above 1; default 3. A huge value such as `1e12` turns it off.
//! * `log_ratio_guard`: 20 under verl, a number, or `off`.
//! * `loss_agg_mode`: any of `docs/losses/aggregation.md`.
//! * `epsilon_low`, `epsilon_high`, `delta`: as in [grpo](super::grpo).
//!
//! ```yaml
//! semantics: verl
//! loss_type: vanilla
//! clip_ratio_c: 3.0
//! loss_agg_mode: seq-mean-token-mean
//! beta: 0.001
//! kl_estimator: low_var_kl
//! ```

use super::loss::{Loss, LossTraits};
use crate::config::{LossConfig, Semantics};
use crate::error::{Error, Result};

/// The loss `vanilla`.
#[derive(Clone, Copy, Debug)]
pub struct Vanilla;

/// verl's `clip_ratio_c`.
pub(super) const CLIP_RATIO_C: f64 = 3.0;
/// verl clamps log-ratios to +- this value.
pub(super) const LOG_RATIO_GUARD: f64 = 20.0;

impl Loss for Vanilla {
    const TRAITS: LossTraits = LossTraits {
        verl_dual_clip: Some(CLIP_RATIO_C),
        verl_log_ratio_guard: Some(LOG_RATIO_GUARD),
        ..LossTraits::PPO
    };

    fn check(&self, config: &LossConfig) -> Result<()> {
        match config.semantics {
            Semantics::Verl => Ok(()),
            other => Err(Error::of_key(
                "loss_type",
                format!(
                    "loss_type vanilla is verl's name, and semantics is {}, which has no such loss: set semantics to `verl`, or \
                 use loss_type grpo (with clip_ratio_c 3.0 for verl's dual clip)",
                    other.name()
                ),
            )),
        }
    }
}
