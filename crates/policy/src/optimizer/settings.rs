//! The settings of optimizers.

use grpo_models::OptimizerName;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

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
    /// The optimizer, which decides the update rule and the format of its state.
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
    /// The weight decay of matrices; norms and biases have none. It is decoupled from the gradient where PyTorch's optimizer decouples it.
    pub weight_decay: f64,
    /// The momentum of optimizers with momentum buffers, in [0, 1); `None` for the default of the optimizer.
    pub momentum: Option<f64>,
    /// The factor of the learning rate for matrices that are orthogonalised. PyTorch's default is `original`.
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
}

/// The factor of the learning rate for an orthogonalised matrix `[A, B]`, with PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// sqrt(max(1, A / B)), Keller Jordan's.
    Original,
    /// 0.2 sqrt(max(A, B)), with which an update has the size of AdamW's (arXiv 2502.16982), so that both rules can share a learning rate.
    #[default]
    MatchRmsAdamw,
}
