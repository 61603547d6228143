//! # gpg
//!
//! Policy gradient without a ratio.
//!
//! **When to use it.** Strictly on-policy training with one update per batch. With more updates nothing limits the policy's
//! movement.
//!
//! **Source.** GPG, arXiv 2504.02546. verl's `loss_mode: gpg`. Averaged over the step's tokens. Preset:
//! `configs/loss/verl-gpg.yaml`. The paper also scales advantages by the share of groups that carry a signal; that belongs to the
//! advantage estimator.
//!
//! ## Formula
//!
//! ```text
//! P_t = -A l_t
//!
//! dP_t/dl_t = -A
//! ```
//!
//! ## Knobs
//!
//! The loss has no keys of its own and does not use old log-probabilities. `epsilon_low`, `epsilon_high` have no effect; `delta` and
//! `clip_ratio_c` are refused.
//!
//! ```yaml
//! semantics: verl
//! loss_type: gpg
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `gpg`.
#[derive(Clone, Copy, Debug)]
pub struct Gpg;

impl Loss for Gpg {
    const TRAITS: LossTraits = LossTraits::UNCLIPPED;

    fn policy<R: Real>(&self, _: &LossConfig, terms: &TokenTerms<R>, _: &Ratio<R>) -> PolicyTerm<R> {
        PolicyTerm::unclipped(-(terms.advantage.clone() * terms.logp.clone()))
    }
}
