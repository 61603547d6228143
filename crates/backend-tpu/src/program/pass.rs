//! The passes of a loss.

use serde::{Deserialize, Serialize};

/// The computation of a program, with its arguments and results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Log-probabilities and entropies.
    Score,
    /// The loss and gradients, added to the caller's donated accumulators.
    #[default]
    Gradient,
    /// The loss, and dL/dlogits in place of the donated logits.
    GradientInPlace,
}
