//! A comparison of values that arrive in pieces.

use grpo_core::parity::Comparison;

/// The largest difference so far.
#[derive(Debug)]
pub(crate) struct Running {
    worst: Comparison,
    is_complete: bool,
}

impl Running {
    pub(crate) fn new(name: String) -> Self {
        Self { worst: Comparison::new(name, &[], &[], 0.0, 0.0), is_complete: true }
    }

    /// Compares the value at an index of the tensor.
    pub(crate) fn add(&mut self, at: usize, expected: f64, found: f64) {
        let difference = if found.is_finite() { (expected - found).abs() } else { f64::INFINITY };
        let worst = &mut self.worst;
        if worst.entries == 0 || difference > worst.max_abs {
            (worst.max_abs, worst.at, worst.expected, worst.found) = (difference, at, expected, found);
        }
        worst.entries += 1;
    }

    /// Sets the expected number of values; with another number the comparison fails.
    pub(crate) fn expect(&mut self, entries: usize) {
        self.is_complete &= self.worst.entries == entries;
    }

    /// Returns the comparison, with differences relative to `scale`.
    pub(crate) fn finish(self, scale: f64, tolerance: f64) -> Comparison {
        let max_abs = if self.is_complete { self.worst.max_abs } else { f64::INFINITY };
        let max_rel = if scale > 0.0 { max_abs / scale } else { max_abs };
        Comparison { max_abs, max_rel, scale, tolerance, ..self.worst }
    }
}
