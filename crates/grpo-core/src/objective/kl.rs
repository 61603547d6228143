//! The KL term: estimates of KL(policy || reference) from one sampled token.

use super::TokenTerms;
use super::ratio::{Ratio, held, is_free};
use crate::config::{KlEstimator, LossConfig};
use crate::real::Real;

/// The term without beta: the estimate, with its bounds and its bias correction.
pub(super) fn term<R: Real>(config: &LossConfig, terms: &TokenTerms<R>, ref_logp: &R, ratio: &Ratio<R>) -> R {
    let bounds = config.kl_clamps();
    let (estimator, straight_through) = config.kl_estimator.parts();
    let d = ref_logp.clone() - terms.logp.clone();
    let value = bounded(estimator, &d, bounds, config.bias_correction());
    let value = match straight_through {
        true => {
            let k2 = estimate(KlEstimator::K2, &d, false);
            k2.clone() - k2.stop_gradient() + value.stop_gradient()
        }
        false => value,
    };
    if !config.bias_correction() {
        return value;
    }
    let product = value * held(&ratio.log, true).exp();
    let is_k3 = matches!(estimator, KlEstimator::K3 | KlEstimator::LowVarKl) && !straight_through;
    match ratio.plain && is_k3 && bounds == (None, None) {
        // Where nothing is held, the product can be written without a difference of large numbers.
        true => {
            let of_reference = ref_logp.clone() - terms.old_logp.clone();
            let free = R::and(&is_free(&ratio.log, true), &is_free(&of_reference, false));
            R::select(&free, &corrected_k3(&d, &of_reference, ratio), &product)
        }
        false => product,
    }
}

/// An estimate by d = q - l, within bounds of d and of itself.
pub(crate) fn value<R: Real>(estimator: KlEstimator, d: &R, bounds: (Option<f64>, Option<f64>)) -> R {
    bounded(estimator, d, bounds, false)
}

fn bounded<R: Real>(estimator: KlEstimator, d: &R, (input, output): (Option<f64>, Option<f64>), in_product: bool) -> R {
    let d = input.map_or(d.clone(), |bound| d.clamp(-bound, bound));
    let value = estimate(estimator, &d, in_product);
    output.map_or(value.clone(), |bound| value.clamp(-bound, bound))
}

/// By d = q - l. `in_product`: whether a ratio will multiply it.
fn estimate<R: Real>(estimator: KlEstimator, d: &R, in_product: bool) -> R {
    match estimator {
        KlEstimator::K1 => -d.clone(),
        KlEstimator::K2 => d.constant(0.5) * d.clone() * d.clone(),
        KlEstimator::Abs => d.abs(),
        _ => held(d, in_product).exp() - d.clone() - d.constant(1.0),
    }
}

/// r k3 = e^(q - o) - r (d + 1): the factor e^l of the ratio cancels, and with it the difference of large numbers that its
/// derivative, r (l - q), would be. On-policy o follows l without a derivative, and q - o with it.
fn corrected_k3<R: Real>(d: &R, of_reference: &R, ratio: &Ratio<R>) -> R {
    of_reference.exp() - ratio.value.clone() * (d.clone() + d.constant(1.0))
}
