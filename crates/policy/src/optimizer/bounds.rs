//! Upper bounds on weights and moments: they show, before an optimizer step runs, that the step cannot overflow.

/// Upper bounds on the magnitudes of a training state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerBounds {
    /// Largest magnitude of a weight.
    pub weights: f64,
    /// Largest magnitude of a first moment, and of the root of a second one.
    pub moments: f64,
}

impl OptimizerBounds {
    /// Bound on weights: far below the overflow of f32 and bf16, so rounding does not matter.
    pub(super) const LARGEST: f64 = 1e30;
    /// Bound on first moments; their squares are then as far from overflow.
    pub(super) const LARGEST_MOMENT: f64 = 1e15;
    /// More than the relative rounding error of one step.
    pub(super) const ROUNDING: f64 = 1.0 + 1e-5;

    /// Returns bounds for a state whose weights and moments are at most `largest` in magnitude.
    pub fn of_largest(largest: f64) -> Self {
        Self { weights: largest, moments: largest }
    }
}
