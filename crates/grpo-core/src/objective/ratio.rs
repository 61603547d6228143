//! The importance ratio of a token or of its sequence.

use super::TokenTerms;
use crate::backend_api::real::Real;
use crate::config::{ImportanceSamplingLevel, LossConfig, Semantics};

/// Largest exponent of a single ratio or KL term: e^80 fits into f32, with room for advantages and weights.
const LARGEST_EXPONENT: f64 = 80.0;

/// Largest exponent of each factor in the product of a ratio and a KL term.
const LARGEST_OF_A_PRODUCT: f64 = 40.0;

/// Largest log-ratio at verl's sequence-token level.
const LARGEST_SEQUENCE_TOKEN: f64 = 10.0;

/// The importance ratio of a token with its logarithm.
#[derive(Clone, Debug)]
pub struct Ratio<R> {
    /// The log-ratio, after the guard.
    pub log: R,
    /// exp(log).
    pub value: R,
    /// `true` if the ratio is the token's own, exactly exp(l - o).
    pub(super) plain: bool,
}

impl<R: Real> Ratio<R> {
    pub(super) fn new(config: &LossConfig, terms: &TokenTerms<R>) -> Self {
        let own = || terms.logp.clone() - terms.old_logp.clone();
        let log = match (&terms.shared, config.level()) {
            (None, _) | (_, ImportanceSamplingLevel::Token) => own(),
            (Some(shared), ImportanceSamplingLevel::Sequence) => shared.clone(),
            (Some(shared), ImportanceSamplingLevel::SequenceToken) => {
                let log = terms.logp.clone() - terms.logp.stop_gradient() + shared.stop_gradient();
                match config.semantics {
                    Semantics::Verl => log.min(&log.constant(LARGEST_SEQUENCE_TOKEN)),
                    _ => log,
                }
            }
        };
        let guard = config.guard();
        let log = guard.map_or(log.clone(), |bound| log.clamp(-bound, bound));
        let plain = guard.is_none() && config.level() == ImportanceSamplingLevel::Token;
        Self { value: held(&log, false).exp(), log, plain }
    }
}

/// Returns `exponent` saturated at `largest`, so that a finite input gives a finite loss. The derivative stays 1: beyond the bound a
/// term keeps its slope and continues to pull back, whereas a clamp would have no gradient.
///
/// TRL has no such bound and overflows; below the bound results are bit-identical. NaN stays NaN and an infinite exponent
/// becomes NaN, so that neither is hidden.
fn saturated<R: Real>(exponent: &R, largest: f64) -> R {
    let bound = exponent.constant(largest);
    let held = bound.clone() + (exponent.clone() - exponent.stop_gradient());
    R::select(&exponent.le(&bound), exponent, &held)
}

/// Returns `exponent` [`saturated`] at the bound of a single term, or of a factor of a product.
pub(super) fn held<R: Real>(exponent: &R, in_product: bool) -> R {
    saturated(exponent, if in_product { LARGEST_OF_A_PRODUCT } else { LARGEST_EXPONENT })
}

/// Returns `true` if [`held`] does not change an exponent.
pub(super) fn is_free<R: Real>(exponent: &R, in_product: bool) -> R::Bool {
    exponent.lt(&exponent.constant(if in_product { LARGEST_OF_A_PRODUCT } else { LARGEST_EXPONENT }))
}
