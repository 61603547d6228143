//! A comparison of values that arrive in pieces.

use grpo_core::parity::Comparison;

/// The largest difference so far.
#[derive(Debug)]
pub(crate) struct Running(Comparison);

impl Running {
    pub(crate) fn new(name: String) -> Self {
        Self(Comparison::new(name, &[], &[], 0.0, 0.0))
    }

    /// Compares the value at an index of the tensor.
    pub(crate) fn add(&mut self, at: usize, expected: f64, found: f64) {
        let difference = if found.is_finite() { (expected - found).abs() } else { f64::INFINITY };
        let worst = &mut self.0;
        if worst.entries == 0 || difference > worst.max_abs {
            (worst.max_abs, worst.at, worst.expected, worst.found) = (difference, at, expected, found);
        }
        worst.entries += 1;
    }

    /// Returns the comparison of `entries` values, with differences relative to `scale`; with another number of values
    /// it fails.
    pub(crate) fn finish(self, entries: usize, scale: f64, tolerance: f64) -> Comparison {
        let max_abs = if self.0.entries == entries { self.0.max_abs } else { f64::INFINITY };
        let max_rel = if scale > 0.0 { max_abs / scale } else { max_abs };
        Comparison { max_abs, max_rel, scale, tolerance, ..self.0 }
    }
}
