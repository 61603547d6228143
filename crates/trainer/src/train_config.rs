//! The configuration of a run, with TRL's names wherever TRL has the option.
//!
//! Every field serialises and every struct has a default, so that a configuration is the default with some keys changed,
//! and a resolved configuration reproduces its run.

mod grpo;
mod model;
mod optimizer;
#[cfg(test)]
mod tests;
mod validate;

use data::DataConfig;
use grpo_core::{LossAggMode, LossConfig};
use rewards::RewardConfig;
use serde::{Deserialize, Serialize};

pub use crate::run::options::RunOptions;
pub(crate) use grpo::REWARD;
pub use grpo::{FilterGroupsConfig, GrpoConfig, KlControlConfig, KlControlType};
pub use grpo_sinks::wandb::Mode as WandbMode;
pub use grpo_sinks::{LoggingConfig, WandbConfig};
pub use model::ModelSource;
pub use optimizer::{LrSchedulerType, OptimizerConfig};
pub(crate) use validate::check;

/// A whole run: all that its numbers depend on, and `run`, `logging` and `wandb`, on which they do not.
///
/// ```
/// let mut config = trainer::TrainConfig { seed: 1, ..Default::default() };
/// config.grpo.num_generations = 16;
/// config.validate()?;
/// # Ok::<(), trainer::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// The section `run`: what is saved and shown. The numbers do not depend on it.
    pub run: RunOptions,
    /// The section `logging`: where metrics go beside metrics.jsonl.
    pub logging: LoggingConfig,
    /// The section `wandb`: metrics for Weights & Biases.
    pub wandb: WandbConfig,
    /// The seed of everything random: weights, problems, samples.
    pub seed: u64,
    /// The model: a folder or a name of Hugging Face's, or the section `model` with the shape of a new one.
    pub model: ModelSource,
    /// The problems that are trained on and held out.
    pub data: DataConfig,
    /// The weights of the built-in rewards.
    pub rewards: RewardConfig,
    /// The supervised steps before GRPO.
    pub warmup: WarmupConfig,
    /// The sampling of completions.
    pub rollout: RolloutConfig,
    /// The GRPO loop around the loss.
    pub grpo: GrpoConfig,
    /// The loss itself. Its `temperature` and `max_completion_length` follow [`RolloutConfig`]; see
    /// [`TrainConfig::loss`].
    pub loss: LossConfig,
    /// AdamW and its schedule during GRPO.
    pub optimizer: OptimizerConfig,
    /// The evaluation on held-out problems.
    pub eval: EvalConfig,
}

/// A short supervised phase (cross-entropy on reference answers) so that first rewards are not all zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupConfig {
    /// The largest number of optimizer steps; 0 skips the phase.
    pub steps: u64,
    /// The share of a probe of training problems, answered greedily, that ends the phase early once it is right. What a
    /// number of steps buys differs between seeds, and GRPO wants rewards that are neither all 0 nor all 1.
    pub until_pass_at_1: Option<f64>,
    /// The number of problems per step.
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

/// The settings of sampling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// The softmax temperature T > 0 of sampling; the loss uses the same.
    pub temperature: f64,
    /// The largest number of tokens of a completion, EOS included.
    pub max_completion_length: usize,
    /// The largest number of sequences that decode together. It bounds memory and does not change results.
    pub batch_size: usize,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self { temperature: 1.0, max_completion_length: 8, batch_size: 256 }
    }
}

/// The settings of the evaluation on held-out problems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// The number of distinct held-out problems.
    pub num_problems: usize,
    /// The number of sampled completions per problem for the mean reward; 0 skips sampling.
    pub num_generations: usize,
    /// The number of GRPO steps between evaluations; 0 evaluates only before and after.
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

    /// Whether the run has a reference policy: the loss has a KL term, or the reward has.
    pub fn needs_ref_policy(&self) -> bool {
        self.loss.needs_ref_logp() || self.grpo.use_kl_in_reward
    }
}
