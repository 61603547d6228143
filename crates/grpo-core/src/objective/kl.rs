//! The KL term: estimates of KL(policy || reference) from one sampled token.

use super::TokenTerms;
use super::ratio::{Ratio, held, held_product};
use crate::config::{KlEstimator, LossConfig};
use crate::real::Real;

/// The term without beta: the estimate, with its bounds and its bias correction.
pub(super) fn term<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ref_logp: &R, ratio: &Ratio<R>) -> R {
    let (input, output) = config.kl_clamps();
    let (estimator, straight_through) = config.kl_estimator.parts();
    let is_k3 = matches!(estimator, KlEstimator::K3 | KlEstimator::LowVarKl) && !straight_through;
    if config.bias_correction() && ratio.plain && is_k3 && input.is_none() && output.is_none() {
        return corrected_k3(terms, ref_logp, ratio);
    }
    let value = value(estimator, &(ref_logp.clone() - terms.logp.clone()), (input, output));
    let value = match straight_through {
        true => {
            let k2 = estimate(KlEstimator::K2, &(ref_logp.clone() - terms.logp.clone()));
            k2.clone() - k2.stop_gradient() + value.stop_gradient()
        }
        false => value,
    };
    match config.bias_correction() {
        true => value * ratio.value.clone(),
        false => value,
    }
}

/// An estimate by d = q - l, within bounds of d and of itself.
pub(crate) fn value<R: Real>(estimator: KlEstimator, d: &R, (input, output): (Option<f64>, Option<f64>)) -> R {
    let d = input.map_or(d.clone(), |bound| d.clamp(-bound, bound));
    let value = estimate(estimator, &d);
    output.map_or(value.clone(), |bound| value.clamp(-bound, bound))
}

/// By d = q - l.
fn estimate<R: Real>(estimator: KlEstimator, d: &R) -> R {
    match estimator {
        KlEstimator::K1 => -d.clone(),
        KlEstimator::K2 => d.constant(0.5) * d.clone() * d.clone(),
        KlEstimator::Abs => d.abs(),
        _ => held(d).exp() - d.clone() - d.constant(1.0),
    }
}

/// r k3 = e^(q - o) - r (d + 1): the factor e^l of the ratio cancels, and with it the difference of large numbers that its
/// derivative, r (l - q), would be.
fn corrected_k3<R: Real>(terms: &TokenTerms<R>, ref_logp: &R, ratio: &Ratio<R>) -> R {
    // On-policy o follows l without a derivative, and q - o with it.
    let fixed = held_product(&(ref_logp.clone() - terms.old_logp.clone())).exp();
    let d = ref_logp.clone() - terms.logp.clone();
    fixed - ratio.value.clone() * (d.clone() + d.constant(1.0))
}
