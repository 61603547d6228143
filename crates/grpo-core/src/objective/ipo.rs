//! # ipo
//!
//! The ratio with a trust region on the token's probability, for both signs of the advantage: prime-rl's default loss.
//!
//! **When to use it.** Asynchronous training, in which the sampler is some steps behind the policy: a token whose probability has
//! moved far has no gradient in either direction. [The loss prime_rl](super::prime_rl) keeps the gradient that moves it back.
//!
//! **Source.** prime-rl's loss of this name (INTELLECT policy optimization) and its default since 2026-08-27 (#3418). prime-rl's
//! `eps` was 0.1 and its `kl_tau` 0.001 until 2026-09-18 (#3586); since then they are 0.3 and 0, which are the defaults here.
//! Averaged over the step's tokens. Preset: `configs/loss/prime-rl.yaml`.
//!
//! ## Formula
//!
//! ```text
//! P_t = -keep adv_tau A r_t + kl_tau (l_t - o_t)^2
//!
//! dP_t/dl_t = -keep adv_tau A r_t + 2 kl_tau (l_t - o_t)
//! ```
//!
//! keep is 0 if the probability has risen by more than `epsilon_high` or fallen by more than `epsilon_low`; else 1. o is the
//! sampler's log-probability: pass it as `old_logp`.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: how far the probability may move, prime-rl's `eps`; default 0.3.
//! * `adv_tau`: factor of the advantage; default 1.
//! * `kl_tau`: weight of the quadratic penalty; default 0, which turns it off.
//!
//! ```yaml
//! loss_type: ipo
//! epsilon_low: 0.3
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms, prime_rl, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `ipo`.
#[derive(Clone, Copy, Debug)]
pub struct Ipo;

impl Loss for Ipo {
    const TRAITS: LossTraits = LossTraits { epsilon: prime_rl::EPSILON, ..trust_region::TRAITS };

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let (too_high, too_low) = trust_region::has_moved(config, terms);
        let outside =
            trust_region::Outside { high: terms.logp.indicator(&too_high), low: terms.logp.indicator(&too_low) };
        trust_region::penalised(config, terms, ratio, outside)
    }
}
