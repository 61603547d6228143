//! The parts of AdamW that all policies share: its settings, the scalars of a step, and bounds on the size of weights and moments.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

mod bounds;
mod eight_bit;

pub use bounds::AdamWBounds;
pub use eight_bit::{
    CodeBook, MOMENT_CODES, MOMENT_SCALES, MomentBlocks, check_moments, is_moment_codes, moment_codes, moment_tensors,
};
pub use models::OptimizerName;

/// Added to the gradient norm in the denominator of the clip factor, as in PyTorch.
pub const CLIP_EPSILON: f64 = 1e-6;

/// The settings of AdamW (arXiv 1711.05101) that stay the same from step to step, with the names and defaults of `transformers`. The
/// learning rate is an argument of [`crate::Policy::apply`].
///
/// ```
/// let adamw = policy::AdamWConfig { skip_grad_norm: Some(10.0), ..Default::default() };
/// assert!(adamw.skips());
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamWConfig {
    /// The optimizer, `adamw` with f32 moments or `adamw_8bit` with moments of one byte per value and a scale per 256 values. The latter saves 6
    /// of 16 bytes per trained weight.
    pub name: OptimizerName,
    /// The decay of the first moment, in [0, 1).
    #[default(0.9)]
    pub adam_beta1: f64,
    /// The decay of the second moment, in [0, 1).
    #[default(0.999)]
    pub adam_beta2: f64,
    /// The constant, above 0, that AdamW adds to the root of the second moment.
    #[default(1e-8)]
    pub adam_epsilon: f64,
    /// The decoupled weight decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// The limit of the 2-norm of the whole gradient; 0 disables clipping.
    #[default(1.0)]
    pub max_grad_norm: f64,
    /// The 2-norm, before clipping, above which an update is skipped; an update with a non-finite gradient is skipped, too. Weights and
    /// moments then stay unchanged. `None` skips nothing, and a non-finite gradient is an error that ends a run.
    pub skip_grad_norm: Option<f64>,
}

impl AdamWConfig {
    /// Returns `true` if a gradient that is too large or not finite skips the update instead of failing.
    pub fn skips(&self) -> bool {
        self.skip_grad_norm.is_some()
    }

    /// Returns the scalars of step `step`, counted from 1. As in PyTorch, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, and
    /// w = w decay - rate m / (sqrt(v) / root + epsilon).
    pub fn step(&self, step: u64, learning_rate: f64) -> AdamWStep {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let max_grad_norm = if self.max_grad_norm > 0.0 { self.max_grad_norm } else { f64::INFINITY };
        AdamWStep {
            beta1: self.adam_beta1 as f32,
            beta2: self.adam_beta2 as f32,
            rate: (learning_rate / correction(self.adam_beta1)) as f32,
            root: correction(self.adam_beta2).sqrt() as f32,
            epsilon: self.adam_epsilon as f32,
            decay: (1.0 - learning_rate * self.weight_decay) as f32,
            max_grad_norm: max_grad_norm as f32,
            // Without a limit, every finite norm passes.
            limit: self.skip_grad_norm.unwrap_or(f64::from(f32::MAX)) as f32,
        }
    }
}

/// Scalars of one AdamW step in f32, the precision of the update. [`AdamWConfig::step`] creates them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Learning rate divided by the first moment's bias correction.
    pub rate: f32,
    /// Square root of the second moment's bias correction.
    pub root: f32,
    /// Term added to the square root of the second moment.
    pub epsilon: f32,
    /// Factor applied to weights that decay.
    pub decay: f32,
    /// Gradients with a larger norm are clipped to this norm; infinite if clipping is off.
    pub max_grad_norm: f32,
    /// Largest gradient norm that is applied.
    pub limit: f32,
}
