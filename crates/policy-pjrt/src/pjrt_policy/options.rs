//! Options of a policy on a PJRT device.

use crate::decoder::{Attention, Compute};
use crate::rollout::RolloutOptions;
use crate::train::default_tiling;
use grpo_core::Tiling;
use stablehlo::Save;

/// Options of a policy on a PJRT device.
#[derive(Clone, Debug, PartialEq)]
pub struct PjrtPolicyOptions {
    /// Dtype of the operands of matrix products, in training and sampling, and of the model's matrices on the device. For bf16, the low 16
    /// bits of f32 weights are stored separately, for updates and checkpoints.
    pub compute: Compute,
    /// Attention implementation in training and scoring.
    pub attention: Attention,
    /// Activations that each layer saves for the backward pass: more memory or more recomputation.
    pub save: Save,
    /// Tiling of the logits in the loss.
    pub tiling: Tiling,
    /// Options of sampling.
    pub rollout: RolloutOptions,
    /// `true` if a failed step can be rolled back, which holds weights and moments twice during the step.
    pub can_roll_back: bool,
}

impl Default for PjrtPolicyOptions {
    fn default() -> Self {
        Self {
            compute: Compute::F32,
            attention: Attention::Auto,
            save: Save::Carry,
            tiling: default_tiling(),
            rollout: RolloutOptions::default(),
            can_roll_back: true,
        }
    }
}
