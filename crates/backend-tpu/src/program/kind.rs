//! Which program of a loss: what it computes, and what it takes and gives.

use grpo_core::PolicySpec;
use serde::{Deserialize, Serialize};

/// What a program takes, computes and gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The program computes log-probabilities and entropies.
    Score,
    /// Loss and gradients, added to what the caller donates.
    Gradient,
    /// Loss, and dL/dlogits in place of the donated logits.
    GradientInPlace,
}

/// Which program of a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramKind {
    /// The program computes log-probabilities and entropies.
    Score,
    /// The program computes loss and gradients.
    #[default]
    Gradient,
    /// Loss, and dL/dlogits in place of the given logits.
    GradientInPlace,
    /// The dense loss as automatic differentiation leaves it, whatever the implementation.
    Materialised,
    /// The products of loss and gradients and nothing else; of given logits, one pass over them, in place.
    Bare,
}

impl ProgramKind {
    /// The pass of the program, which says what it takes and gives.
    pub fn pass(self, policy: PolicySpec) -> Pass {
        match (self, policy) {
            (Self::Score, _) => Pass::Score,
            (Self::GradientInPlace, _) | (Self::Bare, PolicySpec::Logits { .. }) => Pass::GradientInPlace,
            (Self::Gradient | Self::Materialised | Self::Bare, _) => Pass::Gradient,
        }
    }
}
