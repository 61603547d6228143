//! Comparing what an implementation computed with what it should have.

use crate::tensor::Dtype;
use serde::Serialize;

/// Largest difference allowed, relative to the scale of the expected tensor.
///
/// The scale of a gradient is its largest entry: not each entry's own size, because small entries are differences of
/// large ones, and never an absolute number, because a bound that an all-zero gradient passes proves nothing. The scale
/// of a log-probability or an entropy is at least 1: they are sums of terms of that order. So is that of a loss, which
/// may cancel to nearly nothing, and it is at least the sum of the magnitudes that cancel.
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
    /// What a computation in `dtype` has to meet. bf16 rounds the inputs, and both sides see the same rounded inputs, so
    /// the bounds are nearly those of f32.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self { loss: 1e-6, logp: 1e-6, entropy: 1e-5, gradient: 2e-5 },
            Dtype::Bf16 => Self { loss: 2e-6, logp: 2e-6, entropy: 1e-5, gradient: 1e-4 },
        }
    }

    /// For gradients made of dL/dlogits in `dlogits` ([`crate::Backend::dlogits`]). bf16 rounds each by 2^-9 at most, which
    /// averages out over many terms and adds up over a few.
    pub fn with_dlogits(self, dlogits: Dtype) -> Self {
        match dlogits {
            Dtype::F32 => self,
            Dtype::Bf16 => Self { gradient: self.gradient.max(1.0 / 128.0), ..self },
        }
    }
}

/// One tensor, compared.
///
/// ```
/// use grpo_core::parity::Comparison;
///
/// let gradient = Comparison::new("grad_hidden", &[0.0, -4.0, 1.0], &[0.0, -4.0, 1.1], 0.0, 0.05);
/// assert!(gradient.passed()); // 0.1 of the largest entry, 4
/// assert_eq!((gradient.at, gradient.scale), (2, 4.0));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the tensor.
    pub name: String,
    /// Number of entries compared.
    pub entries: usize,
    /// Largest |found - expected|; infinite when one of them is not finite, or lengths differ.
    pub max_abs: f64,
    /// `max_abs / scale`; `max_abs` itself when the scale is 0.
    pub max_rel: f64,
    /// Largest |expected|, or the floor given for it.
    pub scale: f64,
    /// Flat index of the largest difference.
    pub at: usize,
    /// What was expected there.
    pub expected: f64,
    /// What was found there.
    pub found: f64,
    /// The bound on `max_rel`.
    pub tolerance: f64,
}

impl Comparison {
    /// Compares `found` with `expected`, entry by entry; the scale is the largest |expected|, but at least `floor`.
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
        // inf / inf: something that is not finite was expected, which nothing can match.
        if worst.max_rel.is_nan() {
            worst.max_rel = f64::INFINITY;
        }
        worst
    }

    /// Whether the difference is within the tolerance.
    pub fn passed(&self) -> bool {
        self.max_rel <= self.tolerance
    }
}

/// The values of one evaluation, widened; what was not computed or is not known is `None`.
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
    /// Compares every tensor that both sides have. Per-token values are compared at `active` rows only: what a masked
    /// token holds is nobody's business. `magnitude` is the sum of |weight x token loss|, the scale of the loss where it is
    /// above 1.
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
    fn what_is_not_finite_or_not_there_never_passes() {
        assert!(!Comparison::new("g", &[1.0], &[f64::NAN], 0.0, 1e9).passed());
        assert!(!Comparison::new("g", &[f64::NAN], &[f64::NAN], 0.0, 1e9).passed());
        assert!(!Comparison::new("g", &[1.0, 2.0], &[1.0], 0.0, 1e9).passed());
        assert!(Comparison::new("g", &[0.0], &[0.0], 0.0, 0.0).passed());
        assert!(!Comparison::new("g", &[0.0], &[1e-3], 0.0, 1e-5).passed());
    }
}
