//! # bnpo
//!
//! The clipped ratio of [grpo](super::grpo), averaged over the active tokens of the step: every token weighs the same.
//!
//! ## Formula
//!
//! ```text
//! P_t = -min( min(r_t, delta) A,  clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A )
//! loss = 1/N Σ P_t          N: active tokens of the step
//! ```
//!
//! ## Gradient
//!
//! As [grpo](super::grpo): -A r_t where the token is not clipped, else 0; times 1/N.
//!
//! ## Where it comes from
//!
//! TRL's `loss_type="bnpo"`, the average of verl's `token-mean`, OpenRLHF and MLLM-JAX. Presets:
//! `configs/loss/trl-bnpo.yaml`, `configs/loss/openrlhf.yaml`, `configs/loss/mllm-jax.yaml`. verl names the average,
//! not the loss: there it is `loss_type: vanilla` with `loss_agg_mode: token-mean`, and `bnpo` is refused.
//!
//! ## Knobs
//!
//! Those of [grpo](super::grpo). In TRL N counts the tokens of one micro-batch, which is why its result depends on how
//! a step is cut; here weights belong to the step, so the cut changes nothing. A batch that is one of several, as TRL
//! sees it, says so with `gradient_accumulation_steps`.
//!
//! ## When to use it
//!
//! Where long answers should count by their length. With steps of very different total lengths [dapo](super::dapo) is
//! the same with a normaliser of the whole generation batch.
//!
//! ```yaml
//! loss_type: bnpo
//! epsilon_low: 0.2
//! epsilon_high: 0.3
//! ```

use super::loss::Loss;

/// The loss `bnpo`.
#[derive(Clone, Copy, Debug)]
pub struct Bnpo;

impl Loss for Bnpo {
    fn names_average(&self) -> Option<&'static str> {
        Some("vanilla")
    }
}
