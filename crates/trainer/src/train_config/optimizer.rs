//! The sections `optimizer` and `warmup.optimizer`: AdamW, its limits, and the learning-rate schedule.

use policy::AdamWConfig;
use serde::{Deserialize, Serialize};

/// The shape of the learning rate after its linear warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// The learning rate stays at `learning_rate`.
    Constant,
    /// The learning rate falls on a line to `min_lr_ratio x learning_rate`.
    #[default]
    Linear,
    /// The learning rate falls on half a cosine to `min_lr_ratio x learning_rate`.
    Cosine,
}

/// AdamW with global-norm clipping and a learning-rate schedule. The defaults are the values of TRL's `GRPOConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The largest learning rate.
    pub learning_rate: f64,
    /// The decay of the first moment, in [0, 1).
    pub adam_beta1: f64,
    /// The decay of the second moment, in [0, 1).
    pub adam_beta2: f64,
    /// The number that is added to the root of the second moment.
    pub adam_epsilon: f64,
    /// The decoupled weight decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// The largest 2-norm of the whole gradient; 0 switches clipping off.
    pub max_grad_norm: f64,
    /// The 2-norm, before clipping, above which an update is skipped; one whose gradient is not finite is skipped, too. Weights,
    /// moments and the learning-rate schedule then stay as they are, and `skipped_updates` counts it. `None` skips nothing, and
    /// a gradient that is not finite ends the run.
    pub skip_grad_norm: Option<f64>,
    /// The number of updates skipped in a row, at least 1, at which the run ends with an error.
    pub max_consecutive_skips: u64,
    /// The share of all steps, in [0, 1], during which the learning rate rises from 0.
    pub warmup_ratio: f64,
    /// The shape of the learning rate after that.
    pub lr_scheduler_type: LrSchedulerType,
    /// The learning rate at which linear and cosine end, as a share of the largest one, in [0, 1].
    pub min_lr_ratio: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            skip_grad_norm: None,
            max_consecutive_skips: 10,
            warmup_ratio: 0.0,
            lr_scheduler_type: LrSchedulerType::default(),
            min_lr_ratio: 0.0,
        }
    }
}

impl OptimizerConfig {
    /// The learning rate of the update after `step` updates of `total_steps`.
    ///
    /// ```
    /// let optimizer = trainer::train_config::OptimizerConfig { warmup_ratio: 0.1, ..Default::default() };
    /// assert_eq!(optimizer.learning_rate_at(10, 100), optimizer.learning_rate);
    /// ```
    pub fn learning_rate_at(&self, step: u64, total_steps: u64) -> f64 {
        let Self { learning_rate, warmup_ratio, lr_scheduler_type, min_lr_ratio, .. } = *self;
        let rise = (warmup_ratio * total_steps as f64).ceil();
        if (step as f64) < rise {
            return learning_rate * (step + 1) as f64 / rise;
        }
        let done = ((step as f64 - rise) / (total_steps as f64 - rise).max(1.0)).min(1.0);
        let share = match lr_scheduler_type {
            LrSchedulerType::Constant => return learning_rate,
            LrSchedulerType::Linear => 1.0 - done,
            LrSchedulerType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        learning_rate * (min_lr_ratio + (1.0 - min_lr_ratio) * share)
    }

    /// The settings that the policy's optimizer is made with.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            adam_beta1: self.adam_beta1,
            adam_beta2: self.adam_beta2,
            adam_epsilon: self.adam_epsilon,
            weight_decay: self.weight_decay,
            max_grad_norm: self.max_grad_norm,
            skip_grad_norm: self.skip_grad_norm,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_rises_then_falls_to_its_floor() {
        let with = |lr_scheduler_type| {
            let config = OptimizerConfig {
                learning_rate: 1.0,
                warmup_ratio: 0.1,
                min_lr_ratio: 0.2,
                lr_scheduler_type,
                ..Default::default()
            };
            move |step| config.learning_rate_at(step, 100)
        };
        let cosine = with(LrSchedulerType::Cosine);
        assert!((cosine(0) - 0.1).abs() < 1e-12);
        assert_eq!(cosine(10), 1.0);
        assert!((cosine(55) - 0.6).abs() < 1e-12);
        assert!((cosine(100) - 0.2).abs() < 1e-12);
        assert!((cosine(1000) - 0.2).abs() < 1e-12);
        assert!((with(LrSchedulerType::Linear)(55) - 0.6).abs() < 1e-12);
        assert_eq!(with(LrSchedulerType::Constant)(99), 1.0);
    }

    #[test]
    fn both_defaults_of_adamw_agree() {
        assert_eq!(OptimizerConfig::default().adamw(), AdamWConfig::default());
    }
}
