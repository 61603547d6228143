//! The trust regions of DPPO (arXiv 2602.04879), which bound the change of a token's probability instead of its ratio.

use super::loss::{Clip, LossTraits};
use super::{PolicyTerm, Ratio, TokenTerms};
use crate::backend_api::real::Real;
use crate::config::LossConfig;

/// The cap of DPPO's ratio. verl's actor passes its own `clip_ratio_c`, 3 by default.
const LARGEST_RATIO: f64 = 20.0;

/// Indicators of tokens outside the region: 1 in `low` if below, 1 in `high` if above.
pub(super) struct Outside<R> {
    pub(super) low: R,
    pub(super) high: R,
}

/// Facts about losses with such a region: epsilon_low is its lower and epsilon_high its upper bound.
pub(super) const TRAITS: LossTraits =
    LossTraits { clip: Clip::Probability, is_of_tokens_only: true, ..LossTraits::PPO };

/// Facts about DPPO's losses.
pub(super) const DPPO: LossTraits = LossTraits {
    dual_clip: Some(LARGEST_RATIO),
    verl_log_ratio_guard: Some(super::vanilla::LOG_RATIO_GUARD),
    ..TRAITS
};

/// Returns -A sg(min(r, c)) l for tokens inside the region, 0 outside.
pub(super) fn dppo<R: Real>(
    config: &LossConfig,
    terms: &TokenTerms<R>,
    ratio: &Ratio<R>,
    Outside { low, high }: Outside<R>,
) -> PolicyTerm<R> {
    let kept = terms.logp.constant(1.0) - high.clone() - low.clone();
    let cap = config.dual_clip().unwrap_or(f64::INFINITY);
    let weight = ratio.value.min(&ratio.value.constant(cap)).stop_gradient();
    let policy = -(weight * kept * terms.advantage.clone() * terms.logp.clone());
    PolicyTerm { low_clipped: low, high_clipped: high, ..PolicyTerm::unclipped(policy) }
}

/// Selects the side that applies: the upper bound (`within_high`) if A > 0, else the lower bound (`within_low`).
pub(super) fn by_advantage<R: Real>(advantage: &R, within_low: &R::Bool, within_high: &R::Bool) -> Outside<R> {
    let (zero, one) = (advantage.constant(0.0), advantage.constant(1.0));
    let positive = zero.lt(advantage);
    let outside = |within: &R::Bool| R::select(within, &zero, &one);
    Outside {
        low: R::select(&positive, &zero, &outside(within_low)),
        high: R::select(&positive, &outside(within_high), &zero),
    }
}

/// Returns -keep adv_tau A r + kl_tau (l - o)^2, where o is the sampler's log-probability and keep is 0 outside the region. Tokens outside
/// still pay the penalty (prime-rl).
pub(super) fn penalised<R: Real>(
    config: &LossConfig,
    terms: &TokenTerms<R>,
    ratio: &Ratio<R>,
    Outside { low, high }: Outside<R>,
) -> PolicyTerm<R> {
    let parameters = &config.parameters.prime_rl;
    let kept = low.constant(1.0) - high.clone() - low.clone();
    let gain = kept * low.constant(parameters.adv_tau) * terms.advantage.clone() * ratio.value.clone();
    let penalty = low.constant(parameters.kl_tau) * ratio.log.clone() * ratio.log.clone();
    PolicyTerm { low_clipped: low, high_clipped: high, ..PolicyTerm::unclipped(penalty - gain) }
}

/// Returns whether the probability has risen by more than epsilon_high, and whether it has fallen by more than epsilon_low.
pub(super) fn has_moved<R: Real>(config: &LossConfig, terms: &TokenTerms<R>) -> (R::Bool, R::Bool) {
    let change = terms.logp.stop_gradient().exp() - terms.old_logp.stop_gradient().exp();
    (change.constant(config.upper_epsilon()).lt(&change), change.lt(&change.constant(-config.lower_epsilon())))
}
