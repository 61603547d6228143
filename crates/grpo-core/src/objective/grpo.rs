//! # grpo
//!
//! Clipped ratio, mean over the tokens of each sequence, then over sequences.
//!
//! ## Formula
//!
//! ```text
//! r_t = e^(l_t - o_t)
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/B Σ_b 1/|y_b| Σ_t P_t
//! ```
//!
//! `delta` is left out where it is not set. Under `semantics: verl` grpo is another name of [vanilla](super::vanilla):
//! a dual clip, a log-ratio guard, and the mean over all tokens. Under `mllm_jax` it is averaged as
//! [bnpo](super::bnpo).
//!
//! ## Gradient
//!
//! ```text
//! dP_t/dl_t = -A r_t   where the token is not clipped, else 0
//! ```
//!
//! Clipped is A > 0 with r > 1 + epsilon_high, and A < 0 with r < 1 - epsilon_low or r > delta. So what would move the
//! ratio further away gives nothing, and what brings it back always counts. On-policy (no old log-probabilities) r is
//! 1 and the gradient -A.
//!
//! With `importance_sampling_level: sequence` the ratio is e^(mean of l - o), as in [gspo](super::gspo).
//!
//! ## Where it comes from
//!
//! DeepSeekMath, arXiv 2402.03300; the clip is PPO's, arXiv 1707.06347; the asymmetric one DAPO's, arXiv 2503.14476;
//! `delta` (two-sided clipping) is INTELLECT-2's, arXiv 2505.07291. Presets: `configs/loss/trl-grpo.yaml`,
//! `configs/loss/verl-grpo.yaml`, `configs/loss/tunix-grpo.yaml`.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: how far the ratio may move. `epsilon_high` left out is `epsilon_low`.
//! * `delta`: cap of the ratio where A < 0, which the clip leaves open above. Has to be above 1 + epsilon_high.
//! * `clip_ratio_c`: the dual clip of [vanilla](super::vanilla), off here.
//! * What all losses share is in `docs/losses/README.md#what-all-losses-share`.
//!
//! ## When to use it
//!
//! The default to start from, with several completions per prompt and little reuse of a batch. A token of a short
//! sequence weighs more than one of a long sequence: where that favours short right answers and long wrong ones, use
//! [dapo](super::dapo) or [dr_grpo](super::dr_grpo). With many updates per batch, or a sampler that drifts,
//! [gspo](super::gspo), [cispo](super::cispo) or [vespo](super::vespo) are steadier.
//!
//! ```yaml
//! loss_type: grpo
//! epsilon_low: 0.2
//! epsilon_high: 0.2
//! delta: 4.0
//! beta: 0.04
//! ```

use super::loss::{Average, Loss};
use crate::config::{LossConfig, Semantics};

/// The loss `grpo`.
#[derive(Clone, Copy, Debug)]
pub struct Grpo;

impl Loss for Grpo {
    fn dual_clip(&self, config: &LossConfig) -> Option<f64> {
        match config.semantics {
            Semantics::Verl => config.clip_ratio_c.or(Some(super::vanilla::CLIP_RATIO_C)),
            _ => config.clip_ratio_c,
        }
    }

    fn log_ratio_guard(&self, semantics: Semantics) -> Option<f64> {
        (semantics == Semantics::Verl).then_some(super::vanilla::LOG_RATIO_GUARD)
    }

    fn average(&self, config: &LossConfig) -> Average {
        match config.semantics {
            Semantics::MllmJax => Average::StepTokens,
            _ => Average::Sequences,
        }
    }
}
