//! Everything a run depends on, with TRL's names wherever TRL has the knob.
//!
//! Every field serialises and every struct has a default, so that a configuration is "the default with these keys
//! changed" and a resolved configuration reproduces its run.

mod data;
mod grpo;
#[cfg(test)]
mod tests;
mod validate;

use grpo_core::rewards::SoftOverlong;
use grpo_core::{LossAggMode, LossConfig};
use serde::{Deserialize, Serialize};

pub use crate::model::ModelConfig;
pub use crate::run::options::RunOptions;
pub use data::{
    AdditionConfig, ComparisonConfig, CountdownConfig, DataConfig, ReverseConfig, SortingConfig, TasksConfig,
};
pub(crate) use grpo::REWARD;
pub use grpo::{FilterGroupsConfig, GrpoConfig, KlControlConfig, KlControlType};
pub use grpo_sinks::wandb::Mode as WandbMode;
pub use grpo_sinks::{LoggingConfig, WandbConfig};
pub(crate) use validate::check;

/// A whole run: all that its numbers depend on, and `run`, `logging` and `wandb`, on which they do not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// What is saved and shown; the numbers do not depend on it.
    pub run: RunOptions,
    /// Metrics beside metrics.jsonl.
    pub logging: LoggingConfig,
    /// Metrics for Weights & Biases.
    pub wandb: WandbConfig,
    /// Seed of everything random: weights, problems, samples.
    pub seed: u64,
    /// The policy.
    pub model: ModelConfig,
    /// The problems.
    pub data: DataConfig,
    /// Weights of the built-in rewards.
    pub rewards: RewardConfig,
    /// Supervised steps before GRPO.
    pub warmup: WarmupConfig,
    /// Sampling.
    pub rollout: RolloutConfig,
    /// The GRPO loop.
    pub grpo: GrpoConfig,
    /// The loss itself. Its `temperature` and `max_completion_length` follow [`RolloutConfig`]; see
    /// [`TrainConfig::loss`].
    pub loss: LossConfig,
    /// AdamW and its schedule during GRPO.
    pub optimizer: OptimizerConfig,
    /// Held-out evaluation.
    pub eval: EvalConfig,
}

/// Weights of the built-in rewards; a weight of 0 leaves the reward out. The reward is the weighted sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardConfig {
    /// 1 when the task verifies the completion, else 0.
    pub correct: f32,
    /// Partial credit in [0, 1], per character unless the task defines its own.
    pub partial: f32,
    /// 1 when the completion ended by itself (EOS) within the length limit, else 0.
    pub terminated: f32,
    /// The penalty for completions that come near the length limit, in tokens with EOS (DAPO). Its weight is its own
    /// `penalty_factor`; `None` is off.
    pub soft_overlong_punishment: Option<SoftOverlong>,
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self { correct: 1.0, partial: 0.0, terminated: 0.0, soft_overlong_punishment: None }
    }
}

/// A short supervised phase (cross-entropy on reference answers) so that first rewards are not all zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupConfig {
    /// Most optimizer steps; 0 skips the phase.
    pub steps: u64,
    /// Ends the phase early, once this share of a probe of training problems is answered right (greedily): what a
    /// number of steps buys differs between seeds, and GRPO wants rewards that are neither all 0 nor all 1.
    pub until_pass_at_1: Option<f64>,
    /// Problems per step.
    pub batch_size: usize,
    /// AdamW and its schedule during the warm-up.
    pub optimizer: OptimizerConfig,
}

impl Default for WarmupConfig {
    fn default() -> Self {
        Self {
            steps: 400,
            until_pass_at_1: Some(0.35),
            batch_size: 128,
            optimizer: OptimizerConfig {
                learning_rate: 2e-3,
                lr_scheduler_type: LrSchedulerType::Constant,
                ..OptimizerConfig::default()
            },
        }
    }
}

/// How completions are sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// Softmax temperature T > 0 of sampling; the loss uses the same.
    pub temperature: f64,
    /// Most tokens of a completion, EOS included.
    pub max_completion_length: usize,
    /// Most sequences decoded together; bounds memory, does not change results.
    pub batch_size: usize,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self { temperature: 1.0, max_completion_length: 8, batch_size: 256 }
    }
}

/// Shape of the learning rate after its linear warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// Stays at `learning_rate`.
    Constant,
    /// Falls on a line to `min_lr_ratio x learning_rate`.
    Linear,
    /// Falls on half a cosine to `min_lr_ratio x learning_rate`.
    #[default]
    Cosine,
}

/// AdamW with global-norm clipping and a learning-rate schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_epsilon: f64,
    /// Decoupled weight decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// Largest 2-norm of the whole gradient; 0 switches clipping off.
    pub max_grad_norm: f64,
    /// Skips an update whose gradient has a larger 2-norm than this, before clipping, or one that is not finite: weights,
    /// moments and the learning-rate schedule stay as they are, and `skipped_updates` counts it. `None` skips nothing, and
    /// a gradient that is not finite ends the run.
    pub skip_grad_norm: Option<f64>,
    /// Ends the run with an error when this many updates in a row would be skipped. At least 1.
    pub max_consecutive_skips: u64,
    /// Share of all steps during which the learning rate rises from 0. In [0, 1].
    pub warmup_ratio: f64,
    /// Shape of what follows.
    pub lr_scheduler_type: LrSchedulerType,
    /// Where linear and cosine end, as a share of the peak. In [0, 1].
    pub min_lr_ratio: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 7e-4,
            adam_beta1: 0.9,
            adam_beta2: 0.98,
            adam_epsilon: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            skip_grad_norm: None,
            max_consecutive_skips: 10,
            warmup_ratio: 0.05,
            lr_scheduler_type: LrSchedulerType::Cosine,
            min_lr_ratio: 0.1,
        }
    }
}

/// Held-out evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Distinct held-out problems.
    pub num_problems: usize,
    /// Sampled completions per problem for the mean reward; 0 skips sampling.
    pub num_generations: usize,
    /// GRPO steps between evaluations; 0 evaluates only before and after.
    pub eval_steps: u64,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { num_problems: 256, num_generations: 2, eval_steps: 50 }
    }
}

impl TrainConfig {
    /// The loss configuration with what follows from the rest filled in: `temperature`, the `max_completion_length` that
    /// dr_grpo divides by, the groups of prompt-mean and token-mean-legacy, and with an adaptive entropy bonus an
    /// `entropy_coef` of 1, which says that there is one: each step brings its coefficient (a program compiled for the loss
    /// stays good while it moves).
    pub fn loss(&self) -> LossConfig {
        let mut loss = self.loss.clone();
        loss.temperature = self.rollout.temperature;
        loss.max_completion_length.get_or_insert(self.rollout.max_completion_length);
        let modes = [loss.loss_agg_mode, loss.kl_agg_mode];
        if modes.contains(&Some(LossAggMode::PromptMean)) {
            loss.num_generations = Some(self.grpo.num_generations);
        }
        if modes.contains(&Some(LossAggMode::TokenMeanLegacy)) {
            loss.micro_batch_size = Some(self.grpo.micro_batch_sequences());
        }
        if self.grpo.use_adaptive_entropy {
            loss.entropy_coef = 1.0;
        }
        loss
    }

    /// Whether the run has a reference: the loss has a KL term, or the reward has.
    pub fn needs_reference(&self) -> bool {
        self.loss.needs_ref_logp() || self.grpo.use_kl_in_reward
    }
}
