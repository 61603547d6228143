//! # bnpo
//!
//! The clipped ratio of [grpo](super::grpo), averaged over the active tokens of the step, so every token has the same weight.
//!
//! **When to use it.** If long answers should count in proportion to their length. If the total length varies much between steps,
//! use [dapo](super::dapo), which divides by the tokens of the whole generation batch.
//!
//! **Source.** TRL's `loss_type="bnpo"`, and the average of verl's `token-mean`, OpenRLHF and MLLM-JAX. Presets:
//! `configs/loss/trl-bnpo.yaml`, `configs/loss/openrlhf.yaml`, `configs/loss/mllm-jax.yaml`. In verl this is an average and not a
//! loss: under `semantics: verl`, write `loss_type: vanilla` with `loss_agg_mode: token-mean`; `bnpo` is refused.
//!
//! ## Formula
//!
//! ```text
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/N Σ P_t          N: active tokens of the step
//! ```
//!
//! As [grpo](super::grpo): -A r_t where the token is not clipped, else 0; times 1/N.
//!
//! ## Knobs
//!
//! The keys are the same as for [grpo](super::grpo). In TRL, N counts the tokens of one micro-batch, so the result depends on how
//! a step is divided into micro-batches. Here N counts the tokens of the step, and the division changes nothing. For a batch that is one
//! micro-batch of several, as in TRL, set `gradient_accumulation_steps`.
//!
//! ```yaml
//! loss_type: bnpo
//! epsilon_low: 0.2
//! epsilon_high: 0.3
//! ```

use super::loss::{Loss, LossTraits};

/// The loss `bnpo`.
#[derive(Clone, Copy, Debug)]
pub struct Bnpo;

impl Loss for Bnpo {
    const TRAITS: LossTraits = LossTraits { names_average: Some("vanilla"), ..LossTraits::PPO };
}
