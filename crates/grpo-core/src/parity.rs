//! Comparison of computed with expected values.

use crate::tensor::Dtype;
use serde::Serialize;

/// Largest allowed differences, relative to the scale of the expected tensor.
///
/// The scale of a gradient is its largest entry. It is not each entry's own size, because small entries are differences of
/// large ones, and not an absolute number, because an all-zero gradient would pass. The scale
/// of a log-probability or an entropy is at least 1, because both are sums of terms of that order. The scale of a loss is also at least 1,
/// and at least the sum of the magnitudes of its terms, because the terms may cancel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerances {
    /// Tolerance of the loss.
    pub loss: f64,
    /// Tolerance of log-probabilities.
    pub logp: f64,
    /// Tolerance of entropies.
    pub entropy: f64,
    /// Tolerance of every gradient.
    pub gradient: f64,
}

impl Tolerances {
    /// Returns the tolerances for computations in `dtype`. bf16 rounds the inputs, but both sides use the same rounded inputs, so
    /// the bounds are close to f32's.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self { loss: 1e-6, logp: 1e-6, entropy: 1e-5, gradient: 2e-5 },
            Dtype::Bf16 => Self { loss: 2e-6, logp: 2e-6, entropy: 1e-5, gradient: 1e-4 },
        }
    }

    /// Adapts the gradient's tolerance to dL/dlogits in `dlogits` ([`crate::Backend::dlogits`]). bf16 rounds each entry by at most 2^-9; the
    /// errors average out over many terms but not over few.
    pub fn with_dlogits(self, dlogits: Dtype) -> Self {
        match dlogits {
            Dtype::F32 => self,
            Dtype::Bf16 => Self { gradient: self.gradient.max(1.0 / 128.0), ..self },
        }
    }
}

/// The comparison of one tensor.
///
/// ```
/// use grpo_core::parity::Comparison;
///
/// let gradient = Comparison::new("grad_hidden", &[0.0, -4.0, 1.0], &[0.0, -4.0, 1.1], 0.0, 0.05);
/// assert!(gradient.passed()); // a difference of 0.1, relative to the largest entry, 4
/// assert_eq!((gradient.at, gradient.scale), (2, 4.0));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the tensor.
    pub name: String,
    /// Number of entries compared.
    pub entries: usize,
    /// Largest |found - expected|; infinite if a value is not finite or lengths differ.
    pub max_abs: f64,
    /// `max_abs / scale`; `max_abs` itself if the scale is 0.
    pub max_rel: f64,
    /// Largest |expected|, or the given minimum.
    pub scale: f64,
    /// Flat index of the largest difference.
    pub at: usize,
    /// The expected value at `at`.
    pub expected: f64,
    /// The value found at `at`.
    pub found: f64,
    /// The bound on `max_rel`.
    pub tolerance: f64,
}

impl Comparison {
    /// Compares `found` with `expected` entry by entry. The scale is the largest |expected|, but at least `floor`.
    pub fn new(name: impl Into<String>, expected: &[f64], found: &[f64], floor: f64, tolerance: f64) -> Self {
        let name = name.into();
        let mut worst = Self {
            name,
            entries: expected.len(),
            max_abs: 0.0,
            max_rel: 0.0,
            scale: expected.iter().fold(floor, |m, e| m.max(e.abs())),
            at: 0,
            expected: expected.first().copied().unwrap_or(0.0),
            found: found.first().copied().unwrap_or(0.0),
            tolerance,
        };
        if expected.len() != found.len() {
            worst.max_abs = f64::INFINITY;
            worst.max_rel = f64::INFINITY;
            return worst;
        }
        for (at, (e, f)) in expected.iter().zip(found).enumerate() {
            let difference = if e.is_finite() && f.is_finite() { (e - f).abs() } else { f64::INFINITY };
            if difference > worst.max_abs {
                (worst.max_abs, worst.at, worst.expected, worst.found) = (difference, at, *e, *f);
            }
        }
        worst.max_rel = if worst.scale > 0.0 { worst.max_abs / worst.scale } else { worst.max_abs };
        // inf / inf: an expected value is not finite, so nothing can match it.
        if worst.max_rel.is_nan() {
            worst.max_rel = f64::INFINITY;
        }
        worst
    }

    /// Returns `true` if the difference is within the tolerance.
    pub fn passed(&self) -> bool {
        self.max_rel <= self.tolerance
    }
}

/// The values of one evaluation, in f64; `None` for values that are unknown or were not computed.
///
/// ```
/// use grpo_core::Dtype;
/// use grpo_core::parity::{Tolerances, Values};
///
/// let expected = Values { loss: Some(0.25), logp: Some(vec![-0.7, -1.2]), ..Values::default() };
/// let found = Values { loss: Some(0.25), logp: Some(vec![-0.7, -1.5]), ..Values::default() };
/// let compared = expected.compare(&found, &[0, 1], 1.0, &Tolerances::of(Dtype::F32));
/// assert_eq!(compared.iter().map(|c| (c.name.as_str(), c.passed())).collect::<Vec<_>>(), [("loss", true), ("logp", false)]);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    /// The loss.
    pub loss: Option<f64>,
    /// Log-probabilities `[N]`.
    pub logp: Option<Vec<f64>>,
    /// Entropies `[N]`.
    pub entropy: Option<Vec<f64>>,
    /// dL/dhidden `[N, H]`.
    pub grad_hidden: Option<Vec<f64>>,
    /// dL/dlm_head.
    pub grad_lm_head: Option<Vec<f64>>,
    /// dL/dbias `[V]`.
    pub grad_bias: Option<Vec<f64>>,
    /// dL/dlogits `[N, V]`.
    pub grad_logits: Option<Vec<f64>>,
}

impl Values {
    /// Compares every tensor that both sides have. Values per token are compared at `active` rows only, because values at masked
    /// tokens are unspecified. `magnitude` is the sum of |weight x token loss|, which is the scale of the loss if it exceeds
    /// 1.
    pub fn compare(&self, found: &Self, active: &[usize], magnitude: f64, tolerances: &Tolerances) -> Vec<Comparison> {
        let at_active =
            |v: &[f64]| active.iter().map(|row| v.get(*row).copied().unwrap_or(f64::NAN)).collect::<Vec<_>>();
        let mut comparisons = Vec::new();
        if let (Some(expected), Some(found)) = (self.loss, found.loss) {
            comparisons.push(Comparison::new("loss", &[expected], &[found], magnitude.max(1.0), tolerances.loss));
        }
        let per_token = [
            ("logp", &self.logp, &found.logp, tolerances.logp),
            ("entropy", &self.entropy, &found.entropy, tolerances.entropy),
        ];
        for (name, expected, found, tolerance) in per_token {
            if let (Some(expected), Some(found)) = (expected, found) {
                comparisons.push(Comparison::new(name, &at_active(expected), &at_active(found), 1.0, tolerance));
            }
        }
        let gradients = [
            ("grad_hidden", &self.grad_hidden, &found.grad_hidden),
            ("grad_lm_head", &self.grad_lm_head, &found.grad_lm_head),
            ("grad_bias", &self.grad_bias, &found.grad_bias),
            ("grad_logits", &self.grad_logits, &found.grad_logits),
        ];
        for (name, expected, found) in gradients {
            if let (Some(expected), Some(found)) = (expected, found) {
                comparisons.push(Comparison::new(name, expected, found, 0.0, tolerances.gradient));
            }
        }
        comparisons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_the_worst_entry_relative_to_the_largest() {
        let c = Comparison::new("g", &[0.0, -4.0, 1.0], &[0.1, -4.0, 1.2], 0.0, 0.04);
        assert_eq!((c.at, c.scale), (2, 4.0));
        assert!((c.max_rel - 0.05).abs() < 1e-12 && !c.passed());
        assert!(Comparison::new("g", &[0.0, -4.0, 1.0], &[0.1, -4.0, 1.1], 0.0, 0.04).passed());
    }

    #[test]
    fn a_floor_keeps_a_loss_that_cancels_comparable() {
        assert!(Comparison::new("loss", &[1e-9], &[3e-7], 1.0, 1e-6).passed());
        assert!(!Comparison::new("loss", &[10.0], &[10.00002], 1.0, 1e-6).passed());
    }

    #[test]
    fn an_all_zero_gradient_never_passes() {
        for largest in [1e-12, 1e-3, 1e3] {
            assert!(!Comparison::new("g", &[largest, 0.0], &[0.0, 0.0], 0.0, 0.5).passed());
        }
    }

    #[test]
    fn values_that_are_not_finite_or_missing_never_pass() {
        assert!(!Comparison::new("g", &[1.0], &[f64::NAN], 0.0, 1e9).passed());
        assert!(!Comparison::new("g", &[f64::NAN], &[f64::NAN], 0.0, 1e9).passed());
        assert!(!Comparison::new("g", &[1.0, 2.0], &[1.0], 0.0, 1e9).passed());
        assert!(Comparison::new("g", &[0.0], &[0.0], 0.0, 0.0).passed());
        assert!(!Comparison::new("g", &[0.0], &[1e-3], 0.0, 1e-5).passed());
    }
}
