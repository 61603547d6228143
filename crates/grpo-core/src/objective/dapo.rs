//! # dapo
//!
//! The clipped ratio of [grpo](super::grpo), usually with a wider upper clip, averaged over the tokens of the whole
//! generation batch.
//!
//! **When to use it.** Long chains of thought, if tokens of long answers should not count less. The usual choice for reasoning.
//!
//! **Source.** DAPO, arXiv 2503.14476; TRL's default `loss_type`. Presets: `configs/loss/trl-dapo.yaml`,
//! `configs/loss/verl-dapo.yaml`. In verl this is an average and not a loss: under `semantics: verl`, write `loss_type: vanilla`;
//! `dapo` is refused.
//!
//! ## Formula
//!
//! ```text
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = Σ P_t / items
//! items = max(num_items_in_batch, 1) / num_processes x gradient_accumulation_steps / steps_per_generation
//! ```
//!
//! Without `num_items_in_batch`, the active tokens of the step are counted, and the loss equals [bnpo](super::bnpo).
//!
//! As in [grpo](super::grpo): -A r_t if the token is not clipped, else 0; times the weight.
//!
//! ## Knobs
//!
//! * `epsilon_high`: 0.28 in the paper ("clip-higher": rare tokens may gain more). The default, as in TRL, is `epsilon_low`.
//! * `num_items_in_batch`, `num_processes`, `gradient_accumulation_steps`, `steps_per_generation`: see
//!   `docs/losses/aggregation.md`.
//! * `mask_truncated_completions` with `truncated_rows`: the paper's overlong filtering.
//! * The other keys are the same as for [grpo](super::grpo).
//!
//! DAPO's dynamic sampling and soft overlong penalty belong to sampling and rewards.
//!
//! ```yaml
//! loss_type: dapo
//! epsilon_low: 0.2
//! epsilon_high: 0.28
//! mask_truncated_completions: true
//! ```

use super::loss::{Average, Loss, LossTraits};

/// The loss `dapo`.
#[derive(Clone, Copy, Debug)]
pub struct Dapo;

impl Loss for Dapo {
    const TRAITS: LossTraits =
        LossTraits { average: Average::GenerationTokens, names_average: Some("vanilla"), ..LossTraits::PPO };
}
