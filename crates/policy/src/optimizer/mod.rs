//! The parts of optimizers that all policies share: settings, update rules, the scalars of a step, and bounds on the size of weights and moments.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

mod adamw;
mod bounds;
mod eight_bit;
mod muon;
mod rule;
mod sgd;

pub use bounds::OptimizerBounds;
pub use eight_bit::{
    CodeBook, MOMENT_CODES, MOMENT_SCALES, MomentBlocks, check_moments, is_moment_codes, moment_codes, moment_tensors,
};
pub use grpo_models::{AdjustLr, OptimizerName};
pub use muon::{Matrices, orthogonalised};
pub use rule::{OptimizerStep, Rule, Slot, UpdateRule, check_optimizer};

/// Added to the gradient norm in the denominator of the clip factor, as in PyTorch.
pub const CLIP_EPSILON: f64 = 1e-6;

/// The settings of an optimizer that stay the same from step to step, with the names and defaults of `transformers`. The
/// learning rate is an argument of [`crate::Policy::apply`].
///
/// ```
/// let settings = grpo_policy::OptimizerSettings { skip_grad_norm: Some(10.0), ..Default::default() };
/// assert!(settings.skips(), "a larger gradient is skipped");
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OptimizerSettings {
    /// The optimizer: `adamw` (arXiv 1711.05101) with f32 moments, `adamw_8bit` with moments of one byte per value and a scale per 256 values, which
    /// saves 6 of 16 bytes per trained weight, `sgd` with momentum, or `muon` for the matrices of layers, with `adamw` for other weights.
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
    /// The weight decay of matrices; norms and biases have none. It is decoupled from the gradient, except in `sgd`, as in PyTorch.
    pub weight_decay: f64,
    /// The momentum of `sgd` and `muon`, in [0, 1); `None` for 0.9 in `sgd` and 0.95 in `muon`.
    pub momentum: Option<f64>,
    /// The factor of the learning rate of `muon` for matrices of layers. PyTorch's default is `original`.
    pub adjust_lr_fn: AdjustLr,
    /// The limit of the 2-norm of the whole gradient; 0 disables clipping.
    #[default(1.0)]
    pub max_grad_norm: f64,
    /// The 2-norm, before clipping, above which an update is skipped; an update with a non-finite gradient is skipped, too. Weights and
    /// moments then stay unchanged. `None` skips nothing, and a non-finite gradient is an error that ends a run.
    pub skip_grad_norm: Option<f64>,
}

impl OptimizerSettings {
    /// Returns `true` if a gradient that is too large or not finite skips the update instead of failing.
    pub fn skips(&self) -> bool {
        self.skip_grad_norm.is_some()
    }

    /// Returns the scalars of step `step`, counted from 1.
    pub fn step(&self, step: u64, learning_rate: f64) -> OptimizerStep {
        OptimizerStep::new(self, step, learning_rate)
    }
}
