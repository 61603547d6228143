//! How a policy uses its device.

use crate::decoder::{Attention, Compute};
use crate::rollout::RolloutOptions;
use crate::train::default_tiling;
use grpo_core::Tiling;
use stablehlo::Save;

/// How a policy uses its device.
#[derive(Clone, Debug, PartialEq)]
pub struct DevicePolicyOptions {
    /// The number type in which products take their operands, in training and in sampling. The model's matrices are on the device in it; what
    /// bf16 leaves out of weights in f32 lies beside them, for updates and checkpoints.
    pub compute: Compute,
    /// How the tokens of a row attend to each other in training and scoring.
    pub attention: Attention,
    /// What is kept of every layer for its derivative: memory against work that is done again.
    pub save: Save,
    /// How the logits of the loss are cut.
    pub tiling: Tiling,
    /// How completions are sampled.
    pub rollout: RolloutOptions,
    /// Whether a step that failed can be taken back, which takes memory for weights and moments twice while it runs.
    pub can_roll_back: bool,
}

impl Default for DevicePolicyOptions {
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
