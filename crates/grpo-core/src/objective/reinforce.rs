//! # reinforce
//!
//! Policy gradient, weighted by the ratio of old policy to sampler if a correction is on.
//!
//! **When to use it.** Asynchronous training on recorded samples, with a truncated weight for safety. Without the sampler's
//! log-probabilities, on-policy training only.
//!
//! **Source.** REINFORCE. verl's rollout correction in bypass mode: for a batch without `old_logp` the weight is the detached
//! ratio of the current policy to the sampler.
//!
//! ## Formula
//!
//! ```text
//! P_t = -w_t A l_t        w_t: the sampler's weight, detached (1 without a correction)
//!
//! dP_t/dl_t = -w_t A
//! ```
//!
//! The term equals [gpg](super::gpg); the name is for use with importance weights.
//!
//! ## Knobs
//!
//! * `rollout_is`, `rollout_is_threshold`, `rollout_rs` or TRL's `vllm_importance_sampling_*`: see
//!   `docs/losses/sampler.md`. Batches without `sampler_logp` have a weight of 1.
//!
//! ```yaml
//! semantics: verl
//! loss_type: reinforce
//! rollout_is: token
//! rollout_is_threshold: 2.0
//! ```

use super::gpg::Gpg;
use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `reinforce`.
#[derive(Clone, Copy, Debug)]
pub struct Reinforce;

impl Loss for Reinforce {
    const TRAITS: LossTraits = LossTraits::UNCLIPPED;

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        Gpg.policy(config, terms, ratio)
    }
}
