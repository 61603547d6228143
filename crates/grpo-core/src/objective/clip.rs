//! PPO's clip, shared by several losses.

use super::loss::Clipped;
use super::{PolicyTerm, TokenTerms, signs};
use crate::backend_api::real::Real;
use crate::config::LossConfig;
use crate::metrics::Metrics;

/// Returns -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A): PPO's clip (arXiv 1707.06347) with asymmetric
/// bounds (DAPO) and the two-sided cap (INTELLECT-2, arXiv 2505.07291). For A < 0 the result is at most -A c (dual clip, arXiv
/// 1912.09729).
pub(super) fn policy<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ratio: &R) -> PolicyTerm<R> {
    let capped = config.delta.map_or(ratio.clone(), |delta| ratio.min(&ratio.constant(delta)));
    let bounded = ratio.clamp(config.ratio_low(), config.ratio_high());
    let advantage = &terms.advantage;
    let loss = -(capped.clone() * advantage.clone()).min(&(bounded * advantage.clone()));
    let (negative, positive) = signs(advantage);
    let zero = ratio.constant(0.0);
    let (policy, dual_clipped) = match config.dual_clip() {
        Some(c) => {
            let bound = -(ratio.constant(c) * advantage.clone());
            let binds = R::and(&bound.lt(&loss), &negative);
            (R::select(&negative, &loss.min(&bound), &loss), ratio.indicator(&binds))
        }
        None => (loss, zero),
    };
    let below = capped.lt(&ratio.constant(config.ratio_low()));
    let above = ratio.constant(config.ratio_high()).lt(&capped);
    PolicyTerm {
        low_clipped: ratio.indicator(&R::and(&below, &negative)),
        high_clipped: ratio.indicator(&R::and(&above, &positive)),
        dual_clipped,
        ..PolicyTerm::unclipped(policy)
    }
}

/// Adds TRL's `clip_ratio/*` and, if `dual`, verl's `pg_clipfrac_lower`.
pub(super) fn metrics(dual: bool, clipped: &Clipped<'_>, metrics: &mut Metrics) {
    let Clipped { sums, tokens, count, masked } = *clipped;
    if dual {
        metrics.mean("pg_clipfrac_lower", sums.dual_clipped, tokens);
    }
    metrics.mean("clip_ratio/low_mean", sums.low_clipped, count);
    metrics.mean("clip_ratio/high_mean", sums.high_clipped, count);
    metrics.mean("clip_ratio/region_mean", sums.low_clipped + sums.high_clipped, count);
    if masked > 0 || sums.low_min.is_finite() {
        metrics.min("clip_ratio/low_min", if masked > 0 { 0.0 } else { sums.low_min });
        metrics.max("clip_ratio/high_max", if masked > 0 { sums.high_max.max(0.0) } else { sums.high_max });
    }
}
