//! Differences between results and the f64 oracle.

use crate::Output;
use crate::margin::assert_below_without_margin;
use grpo_backend_cpu::oracle::Evaluation;

/// Returns the largest difference relative to the largest expected entry.
pub fn difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    let off = got.iter().zip(expected).fold(0.0_f64, |m, (a, b)| {
        let d = (f64::from(*a) - b).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    if off == 0.0 { 0.0 } else { off / largest.max(f64::MIN_POSITIVE) }
}

/// Largest differences of one output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Differences {
    /// Difference of the loss.
    pub loss: f64,
    /// Largest difference of a log-probability.
    pub logp: f64,
    /// Largest difference of an entropy.
    pub entropy: f64,
    /// Largest difference of a gradient.
    pub gradient: f64,
}

impl Differences {
    /// Computes differences: the loss relative to the larger of itself and 1/2 (a mean of terms of about 1 that cancel), logp and entropy
    /// relative to the larger of themselves and 1, gradients relative to their largest entry.
    pub fn new(got: &Output, expected: &Evaluation<f64>) -> Self {
        let per_token = |got: &[f32], expected: &[f64]| {
            let off = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() / b.abs().max(1.0);
            got.iter().zip(expected).map(off).fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { d.max(m) })
        };
        let gradient = [
            difference(&got.hidden, &expected.grad_hidden),
            difference(&got.lm_head, &expected.grad_lm_head),
            difference(&got.bias, &expected.grad_bias),
        ];
        Self {
            loss: (got.loss - expected.loss).abs() / expected.loss.abs().max(0.5),
            logp: per_token(&got.scores.logp, &expected.logp),
            entropy: per_token(&got.scores.entropy, &expected.entropy),
            gradient: gradient.into_iter().fold(0.0, f64::max),
        }
    }

    /// Returns the elementwise maximum.
    pub fn max(self, other: Self) -> Self {
        Self {
            loss: self.loss.max(other.loss),
            logp: self.logp.max(other.logp),
            entropy: self.entropy.max(other.entropy),
            gradient: self.gradient.max(other.gradient),
        }
    }

    /// Asserts the tolerance of f32 arithmetic: logits of about 10 have a spacing of 1e-6, and a sum over H takes a few such steps. bf16
    /// inputs are exact in f32, so the tolerance applies to them too if dlogits are not rounded.
    #[track_caller]
    pub fn assert_small(&self, what: &str) {
        self.assert_within(EXACT, what);
    }

    /// Asserts the tolerances of [`Self::assert_small`] with another tolerance for gradients, and prints the margins.
    #[track_caller]
    pub fn assert_within(&self, gradient: f64, what: &str) {
        for (part, off, bound) in [
            ("loss", self.loss, 3e-6),
            ("logp", self.logp, 3e-6),
            ("entropy", self.entropy, 3e-6),
            ("gradient", self.gradient, gradient),
        ] {
            assert_below_without_margin(&format!("{what}: {part}"), off, bound, HOST);
        }
    }
}

/// Why comparisons of host kernels need no margin.
const HOST: &str = "an instruction set gives the same bits on every processor, and tests run each of them";

/// Tolerance of gradients in f32 arithmetic.
pub const EXACT: f64 = 2e-5;
/// Tolerance of gradients from dlogits rounded to bf16: twice the largest rounding error, since errors of a few terms may add up.
pub const ROUNDED: f64 = 1.0 / 128.0;

/// Asserts that gradients are not zero: a tolerance relative to zero tests nothing.
pub fn assert_flows(expected: &Evaluation<f64>) {
    for (name, list) in [("hidden", &expected.grad_hidden), ("lm_head", &expected.grad_lm_head)] {
        let largest = list.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        assert!(largest > 1e-3, "largest gradient of {name} is only {largest}");
    }
}
