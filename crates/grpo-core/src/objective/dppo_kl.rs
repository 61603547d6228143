//! # dppo_kl
//!
//! As [dppo_tv](super::dppo_tv), with a trust region in the KL divergence of the binary distribution "this token or another".
//!
//! **When to use it.** As for dppo_tv. The divergence also limits probabilities that approach 0 or 1.
//!
//! **Source.** DPPO, arXiv 2602.04879. verl's `loss_mode: dppo_kl`. Preset: `configs/loss/verl-dppo-kl.yaml`.
//!
//! ## Formula
//!
//! ```text
//! p = e^l, p_o = e^o
//! D = p_o (o - l) + (1 - p_o) log( (1 - p_o + 1e-8) / (1 - p + 1e-8) )
//! within: D <= epsilon_high  or p <= p_o     for A > 0
//!         D <= epsilon_low   or p_o <= p     for A <= 0
//! P_t = -sg( min(r_t, clip_ratio_c) ) A l_t    where within, else 0
//!
//! dP_t/dl_t = -A min(r_t, clip_ratio_c)   where within, else 0
//! ```
//!
//! A token whose probability moves against the direction of its advantage is always within.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: bounds of the divergence in nats, for the two signs of the advantage. The common
//!   default of 0.2 is a wide region here: a token may go from 0.37 to 0.13.
//! * `clip_ratio_c`, `log_ratio_guard`, `delta`: as [dppo_tv](super::dppo_tv).
//!
//! ```yaml
//! semantics: verl
//! loss_type: dppo_kl
//! epsilon_low: 0.05
//! epsilon_high: 0.05
//! clip_ratio_c: 3.0
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `dppo_kl`.
#[derive(Clone, Copy, Debug)]
pub struct DppoKl;

impl Loss for DppoKl {
    const TRAITS: LossTraits = trust_region::DPPO;

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let (logp, old_logp) = (terms.logp.stop_gradient(), terms.old_logp.stop_gradient());
        let (p, old) = (logp.exp(), old_logp.exp());
        // verl adds 1e-8 to the probability of the other tokens.
        let other = |p: &R| p.constant(1.0) - p.clone() + p.constant(1e-8);
        let divergence =
            old.clone() * (old_logp - logp) + (old.constant(1.0) - old.clone()) * (other(&old) / other(&p)).ln();
        let (low, high) = (p.constant(config.lower_epsilon()), p.constant(config.upper_epsilon()));
        let (rises, falls) = (R::or(&divergence.le(&high), &p.le(&old)), R::or(&divergence.le(&low), &old.le(&p)));
        let outside = trust_region::by_advantage(&terms.advantage, &falls, &rises);
        trust_region::dppo(config, terms, ratio, outside)
    }
}
