//! # dppo_tv
//!
//! The capped, detached ratio weights the log-probability as long as the token's probability stays close to the old one.
//!
//! **When to use it.** Large vocabularies and off-policy steps. A clip of the ratio would stop rare tokens first and leave common
//! tokens unbounded.
//!
//! **Source.** DPPO, arXiv 2602.04879. verl's `loss_mode: dppo_tv`. Preset: `configs/loss/verl-dppo-tv.yaml`.
//!
//! ## Formula
//!
//! ```text
//! p = e^l, p_o = e^o
//! within: p - p_o <= epsilon_high   for A > 0
//!         p_o - p <= epsilon_low    for A <= 0
//! P_t = -sg( min(r_t, clip_ratio_c) ) A l_t    where within, else 0
//!
//! dP_t/dl_t = -A min(r_t, clip_ratio_c)   where within, else 0
//! ```
//!
//! The bounds are differences of probabilities: a rare token may multiply its probability, a common token may not.
//!
//! ## Knobs
//!
//! * `epsilon_low`, `epsilon_high`: how far the probability may fall and rise.
//! * `clip_ratio_c`: cap of the ratio. The default is 20, as in verl's function. verl's actor always passes its own `clip_ratio_c`,
//!   3 by default, so a verl run uses 3, and so does the preset.
//! * `log_ratio_guard`: 20 under verl; it clamps only the weight, the gradient remains.
//! * `delta` is refused.
//!
//! ```yaml
//! semantics: verl
//! loss_type: dppo_tv
//! epsilon_low: 0.2
//! epsilon_high: 0.2
//! clip_ratio_c: 3.0
//! ```

use super::loss::{Loss, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms, trust_region};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The loss `dppo_tv`.
#[derive(Clone, Copy, Debug)]
pub struct DppoTv;

impl Loss for DppoTv {
    const TRAITS: LossTraits = trust_region::DPPO;

    fn policy<R: Real>(&self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
        let (p, old) = (terms.logp.stop_gradient().exp(), terms.old_logp.stop_gradient().exp());
        let rises = (p.clone() - old.clone()).le(&p.constant(config.upper_epsilon()));
        let falls = (old - p.clone()).le(&p.constant(config.lower_epsilon()));
        let outside = trust_region::by_advantage(&terms.advantage, &falls, &rises);
        trust_region::dppo(config, terms, ratio, outside)
    }
}
