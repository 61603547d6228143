//! # ipo
//!
//! [prime_rl](super::prime_rl) with a region that does not ask for the sign of the advantage.
//!
//! ## Formula
//!
//! ```text
//! P_t = -keep adv_tau A r_t + kl_tau (l_t - o_t)^2
//! ```
//!
//! keep is 0 where the probability has risen by more than `epsilon_high` or fallen by more than `epsilon_low`; else 1.
//!
//! ## Gradient
//!
//! ```text
//! dP_t/dl_t = -keep adv_tau A r_t + 2 kl_tau (l_t - o_t)
//! ```
//!
//! ## Where it comes from
//!
//! prime-rl's loss of that name (INTELLECT policy optimization), with 0.1 on both sides. Averaged over the step's
//! tokens.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: how far the probability may move; 0.2 unless set, prime-rl has 0.1.
//! * `adv_tau`, `kl_tau`: as [prime_rl](super::prime_rl).
//!
//! ## When to use it
//!
//! As [prime_rl](super::prime_rl), where a token that has moved far should have no say in either direction.
//!
//! ```yaml
//! loss_type: ipo
//! epsilon_low: 0.1
//! epsilon_high: 0.1
//! ```

use super::loss::{Bounds, Loss};
use super::{PolicyTerm, Ratio, TokenTerms, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `ipo`.
#[derive(Clone, Copy, Debug)]
pub struct Ipo;

impl Loss for Ipo {
    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let (too_high, too_low) = trust_region::has_moved(config, terms);
        let outside =
            trust_region::Outside { high: terms.logp.indicator(&too_high), low: terms.logp.indicator(&too_low) };
        trust_region::penalised(config, terms, ratio, outside)
    }

    fn bounds(&self, config: &LossConfig) -> Bounds {
        trust_region::bounds(config)
    }

    fn is_of_tokens_only(&self) -> bool {
        true
    }
}
