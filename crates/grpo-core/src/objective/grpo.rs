//! # grpo
//!
//! The clipped ratio, averaged over the tokens of each sequence, then over sequences.
//!
//! **When to use it.** The default to start with, for several completions per prompt and few updates per batch. A token of a
//! short sequence has a larger weight than a token of a long sequence. If that favours short correct answers and long wrong
//! answers, use [dapo](super::dapo) or [dr_grpo](super::dr_grpo). With many updates per batch, or a sampler that differs from the
//! policy, [gspo](super::gspo), [cispo](super::cispo) and [vespo](super::vespo) are more stable.
//!
//! **Source.** DeepSeekMath, arXiv 2402.03300. The clip is from PPO, arXiv 1707.06347, the asymmetric clip from DAPO, arXiv
//! 2503.14476, and `delta` (two-sided clipping) from INTELLECT-2, arXiv 2505.07291. Presets: `configs/loss/trl-grpo.yaml`,
//! `configs/loss/verl-grpo.yaml`, `configs/loss/tunix-grpo.yaml`.
//!
//! ## Formula
//!
//! ```text
//! r_t = e^(l_t - o_t)
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/B Σ_b 1/|y_b| Σ_t P_t
//!
//! dP_t/dl_t = -A r_t   if the token is not clipped, else 0
//! ```
//!
//! Without `delta` the inner min is omitted. Under `semantics: verl`, grpo is an alias of [vanilla](super::vanilla):
//! a dual clip, a log-ratio guard, and the mean over all tokens. Under `mllm_jax` it is averaged as
//! [bnpo](super::bnpo).
//!
//! A token is clipped if A > 0 and r > 1 + epsilon_high, or if A < 0 and r < 1 - epsilon_low or r > delta. A move that takes the
//! ratio further from 1 then has no gradient, and a move back always has one. On-policy (no old log-probabilities) r is
//! 1 and the gradient is -A.
//!
//! With `importance_sampling_level: sequence` the ratio is e^(mean of l - o), as in [gspo](super::gspo).
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: how far the ratio may move from 1. `epsilon_high` defaults to `epsilon_low`.
//! * `delta`: cap of the ratio for A < 0, for which the clip has no upper bound. Must be above 1 + epsilon_high.
//! * `clip_ratio_c`: the dual clip of [vanilla](super::vanilla); off by default.
//! * The keys that all losses share are in `docs/losses/README.md#what-all-losses-share`.
//!
//! ```yaml
//! loss_type: grpo
//! epsilon_low: 0.2
//! epsilon_high: 0.2
//! delta: 4.0
//! beta: 0.04
//! ```

use super::loss::{Average, Loss, LossTraits};

/// The loss `grpo`.
#[derive(Clone, Copy, Debug)]
pub struct Grpo;

impl Loss for Grpo {
    const TRAITS: LossTraits = LossTraits {
        verl_dual_clip: Some(super::vanilla::CLIP_RATIO_C),
        verl_log_ratio_guard: Some(super::vanilla::LOG_RATIO_GUARD),
        average: Average::Sequences,
        mllm_jax_average: Some(Average::StepTokens),
        ..LossTraits::PPO
    };
}
