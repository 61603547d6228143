//! # gpg
//!
//! Policy gradient without a ratio.
//!
//! ## Formula
//!
//! ```text
//! P_t = -A l_t
//! ```
//!
//! ## Gradient
//!
//! ```text
//! dP_t/dl_t = -A
//! ```
//!
//! ## Where it comes from
//!
//! GPG, arXiv 2504.02546. verl's `loss_mode: gpg`. Averaged over the step's tokens. Preset:
//! `configs/loss/verl-gpg.yaml`. The paper's scaling of advantages by the share of groups that say something belongs
//! to the advantages.
//!
//! ## Knobs
//!
//! None of its own; old log-probabilities are not used. `epsilon_low`, `epsilon_high` do nothing; `delta`,
//! `clip_ratio_c` are refused (verl hands `clip_ratio_c` to every loss: there it is accepted and not read).
//!
//! ## When to use it
//!
//! Strictly on-policy training: one update per batch. With more than one nothing holds the policy.
//!
//! ```yaml
//! semantics: verl
//! loss_type: gpg
//! ```

use super::loss::{Bounds, Loss};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `gpg`.
#[derive(Clone, Copy, Debug)]
pub struct Gpg;

impl Loss for Gpg {
    fn policy<R: Real>(&self, _: &LossConfig, terms: &TokenTerms<R>, _: &Ratio<R>) -> PolicyTerm<R> {
        PolicyTerm::unclipped(-(terms.advantage.clone() * terms.logp.clone()))
    }

    fn bounds(&self, _: &LossConfig) -> Bounds {
        Bounds::None
    }

    fn is_of_tokens_only(&self) -> bool {
        true
    }
}
