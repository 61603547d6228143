//! Kinds of programs of a loss, and their arguments and results.

use grpo_core::PolicySpec;
use serde::{Deserialize, Serialize};

/// The computation of a program, with its arguments and results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Log-probabilities and entropies.
    Score,
    /// The loss and gradients, added to the caller's donated accumulators.
    Gradient,
    /// The loss, and dL/dlogits in place of the donated logits.
    GradientInPlace,
}

/// A program of a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramKind {
    /// Log-probabilities and entropies.
    Score,
    /// The loss and gradients.
    #[default]
    Gradient,
    /// The loss, and dL/dlogits in place of the precomputed logits.
    GradientInPlace,
    /// The dense loss as automatic differentiation writes it, for any implementation.
    Materialised,
    /// Only the products of loss and gradients; for precomputed logits, one pass over them, in place.
    Bare,
}

impl ProgramKind {
    /// Returns the pass of the program, which defines its arguments and results.
    pub fn pass(self, policy: PolicySpec) -> Pass {
        match (self, policy) {
            (Self::Score, _) => Pass::Score,
            (Self::GradientInPlace, _) | (Self::Bare, PolicySpec::Logits { .. }) => Pass::GradientInPlace,
            (Self::Gradient | Self::Materialised | Self::Bare, _) => Pass::Gradient,
        }
    }
}
