//! The KL term: estimates of KL(policy || reference) from one sampled token.

use super::TokenTerms;
use super::ratio::{Ratio, held, is_free};
use crate::backend_api::real::Real;
use crate::config::{KlEstimator, KlImportance, LossConfig};

/// Returns the KL term without beta: the weighted estimate, clamped to its bounds. If a bound applies, neither the estimate nor its weight
/// has a gradient.
pub(super) fn term<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ref_logp: &R, ratio: &Ratio<R>) -> R {
    let bounds = config.kl_clamps();
    let (estimator, straight_through) = config.kl_estimator.parts();
    let d = ref_logp.clone() - terms.logp.clone();
    if straight_through {
        // Straight-through estimators are never weighted, and the bounds apply to the value.
        let k2 = estimate(KlEstimator::K2, &d, false);
        return k2.clone() - k2.stop_gradient() + value(estimator, &d, bounds).stop_gradient();
    }
    let (input, output) = bounds;
    let Some(weight) = Weight::new(config, terms, ratio) else { return value(estimator, &d, bounds) };
    let product = match input {
        Some(bound) => {
            let held = weight.held();
            let within = d.abs().le(&d.constant(bound));
            estimate(estimator, &d.clamp(-bound, bound), true) * R::select(&within, &held, &held.stop_gradient())
        }
        None => weight.times(estimator, &d, ref_logp),
    };
    output.map_or(product.clone(), |bound| product.clamp(-bound, bound))
}

/// The factor of the estimate.
struct Weight<R> {
    log: R,
    /// exp(log).
    value: R,
    /// The log-probability that the token's own is compared with, if `log` is exactly their difference.
    against: Option<R>,
}

impl<R: Real> Weight<R> {
    fn new(config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> Option<Self> {
        let of_token = |against: R| {
            let log = terms.logp.clone() - against.clone();
            Self { value: held(&log, false).exp(), log, against: Some(against) }
        };
        match config.kl_importance() {
            KlImportance::Off => None,
            KlImportance::Ratio => Some(Self {
                log: ratio.log.clone(),
                value: ratio.value.clone(),
                against: ratio.plain.then(|| terms.old_logp.clone()),
            }),
            KlImportance::ScoreFunction => Some(of_token(terms.logp.stop_gradient())),
            KlImportance::Sampler => Some(of_token(match &terms.sampler_logp {
                // NaN marks an unknown sampler log-probability; NaN <= NaN is false.
                Some(sampler) => R::select(&sampler.le(sampler), sampler, &terms.old_logp),
                None => terms.old_logp.clone(),
            })),
        }
    }

    /// Returns the weight, saturated for use in a product.
    fn held(&self) -> R {
        held(&self.log, true).exp()
    }

    /// Returns the weight times the estimate, without bounds.
    fn times(&self, estimator: KlEstimator, d: &R, ref_logp: &R) -> R {
        let product = estimate(estimator, d, true) * self.held();
        match (&self.against, estimator) {
            // If nothing saturates, the product can be written without subtracting large numbers.
            (Some(against), KlEstimator::K3 | KlEstimator::LowVarKl) => {
                let of_reference = ref_logp.clone() - against.clone();
                let free = R::and(&is_free(&self.log, true), &is_free(&of_reference, false));
                R::select(&free, &self.times_k3(d, &of_reference), &product)
            }
            _ => product,
        }
    }

    /// Returns w k3 = e^(q - o) - w (d + 1), where o is the log-probability that l is compared with. The factor e^l of the weight cancels
    /// analytically, and so does the difference of large numbers in the derivative w (l - q). If o is detached l, so is q - o.
    fn times_k3(&self, d: &R, of_reference: &R) -> R {
        of_reference.exp() - self.value.clone() * (d.clone() + d.constant(1.0))
    }
}

/// Returns an estimate as a function of d = q - l, with bounds on d and on the result.
pub(crate) fn value<R: Real>(estimator: KlEstimator, d: &R, (input, output): (Option<f64>, Option<f64>)) -> R {
    let d = input.map_or(d.clone(), |bound| d.clamp(-bound, bound));
    let value = estimate(estimator, &d, false);
    output.map_or(value.clone(), |bound| value.clamp(-bound, bound))
}

/// Returns an estimate as a function of d = q - l. `in_product`: `true` if a ratio will multiply it.
fn estimate<R: Real>(estimator: KlEstimator, d: &R, in_product: bool) -> R {
    match estimator {
        KlEstimator::K1 => -d.clone(),
        KlEstimator::K2 => d.constant(0.5) * d.clone() * d.clone(),
        KlEstimator::Abs => d.abs(),
        _ => held(d, in_product).exp() - d.clone() - d.constant(1.0),
    }
}
