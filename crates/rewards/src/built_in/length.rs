//! The reward for length.

use crate::reward_fn::{RewardFn, RewardInput, one};
use serde::{Deserialize, Serialize};

/// The lengths that the reward `length` penalises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthMode {
    /// Every length but the target.
    #[default]
    Exact,
    /// Lengths above the target.
    Max,
    /// Lengths below the target.
    Min,
}

/// The settings of the reward `length`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthConfig {
    /// The weight of the reward.
    #[serde(default = "one")]
    pub weight: f32,
    /// The target number of tokens, including EOS; at least 1.
    pub target: usize,
    /// The penalised lengths.
    #[serde(default)]
    pub mode: LengthMode,
}

/// The reward `length`: -min(|length - target| / target, 1), in [-1, 0].
#[derive(Clone, Copy, Debug)]
pub struct Length(pub LengthConfig);

impl RewardFn for Length {
    fn name(&self) -> &str {
        "length"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let (length, target) = (input.completion_len() as f64, self.0.target as f64);
        let beside = match self.0.mode {
            LengthMode::Exact => (length - target).abs(),
            LengthMode::Max => (length - target).max(0.0),
            LengthMode::Min => (target - length).max(0.0),
        };
        // Not `-x`, which would be -0 for 0.
        Some((0.0 - (beside / target.max(1.0)).min(1.0)) as f32)
    }
}
