//! Everything a run depends on, with TRL's names wherever TRL has the knob.
//!
//! Every field serialises and every struct has a default, so that a configuration is "the default with these keys
//! changed" and a resolved configuration reproduces its run.

mod metrics;
mod validate;

use grpo_core::advantages::AdvantageConfig;
use grpo_core::{Implementation, LossConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub use crate::model::ModelConfig;
pub use crate::run::options::RunOptions;
pub use metrics::{LoggingConfig, WandbConfig};
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

/// The mixture of problems and its split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Share of all prompts, chosen by a hash of their text, that is never trained on. In (0, 1).
    pub held_out_fraction: f64,
    /// The built-in tasks and how often each is drawn.
    pub tasks: TasksConfig,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { held_out_fraction: 0.1, tasks: TasksConfig::default() }
    }
}

/// One section per built-in task; a weight of 0 leaves the task out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TasksConfig {
    /// `37+48=` -> `085`, or `85` without `zero_pad`.
    pub addition: AdditionConfig,
    /// `37?48=` -> `<`.
    pub comparison: ComparisonConfig,
    /// `sort:3142=` -> `1234`.
    pub sorting: SortingConfig,
    /// `rev:abc=` -> `cba`.
    pub reverse: ReverseConfig,
    /// `2,3,4:14=` -> `2*(3+4)`, or any other expression that is right.
    pub countdown: CountdownConfig,
}

/// Addition of two non-negative integers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdditionConfig {
    /// Relative frequency, >= 0.
    pub weight: f64,
    /// Largest summand.
    pub max_number: u32,
    /// Leading zeros up to a fixed width, `37+08=` -> `045`: much easier to learn.
    pub zero_pad: bool,
}

impl Default for AdditionConfig {
    fn default() -> Self {
        Self { weight: 1.0, max_number: 99, zero_pad: true }
    }
}

/// Which of two integers is larger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ComparisonConfig {
    /// Relative frequency, >= 0.
    pub weight: f64,
    /// Largest number.
    pub max_number: u32,
}

impl Default for ComparisonConfig {
    fn default() -> Self {
        Self { weight: 0.0, max_number: 99 }
    }
}

/// Sorting decimal digits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SortingConfig {
    /// Relative frequency, >= 0.
    pub weight: f64,
    /// Fewest digits.
    pub min_length: usize,
    /// Most digits.
    pub max_length: usize,
}

impl Default for SortingConfig {
    fn default() -> Self {
        Self { weight: 0.0, min_length: 3, max_length: 4 }
    }
}

/// Reversing a word of random lowercase letters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReverseConfig {
    /// Relative frequency, >= 0.
    pub weight: f64,
    /// Fewest letters.
    pub min_length: usize,
    /// Most letters.
    pub max_length: usize,
}

impl Default for ReverseConfig {
    fn default() -> Self {
        Self { weight: 0.0, min_length: 3, max_length: 4 }
    }
}

/// Reaching a target with each of the given numbers once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CountdownConfig {
    /// Relative frequency, >= 0.
    pub weight: f64,
    /// How many numbers are given: 2 to 4.
    pub count: usize,
    /// Largest given number.
    pub max_number: u32,
}

impl Default for CountdownConfig {
    fn default() -> Self {
        Self { weight: 0.0, count: 3, max_number: 9 }
    }
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
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self { correct: 1.0, partial: 0.0, terminated: 0.0 }
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

/// The GRPO loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrpoConfig {
    /// Rollout steps (each is `num_iterations x steps_per_generation` optimizer steps).
    pub max_steps: u64,
    /// Different prompts per rollout step.
    pub prompts_per_step: usize,
    /// Completions per prompt: the group of the group-relative advantage.
    pub num_generations: usize,
    /// mu: passes over each generation batch.
    pub num_iterations: usize,
    /// Optimizer steps per pass; the generation batch is split evenly, whole groups together.
    pub steps_per_generation: usize,
    /// Micro-batches per optimizer step; changes time and memory, not the gradient beyond rounding.
    pub gradient_accumulation_steps: usize,
    /// Who computes the loss, one of [`crate::backends::NAMES`]; changes time and memory, not the numbers beyond tolerance.
    pub backend: String,
    /// PJRT plugin of the backend; without it, what `GRPO_PJRT_PLUGIN` names or `grpo plugin install` installed.
    pub plugin: Option<PathBuf>,
    /// How the loss is computed; changes time and memory, not the numbers beyond tolerance.
    pub implementation: Implementation,
    /// How rewards become advantages.
    pub advantages: AdvantageConfig,
    /// Multiplies every advantage; 1 is GRPO, 0 is the control run that must not learn.
    pub advantage_scale: f32,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self {
            max_steps: 450,
            prompts_per_step: 64,
            num_generations: 8,
            num_iterations: 1,
            steps_per_generation: 1,
            gradient_accumulation_steps: 8,
            backend: "cpu".into(),
            plugin: None,
            implementation: Implementation::default(),
            advantages: AdvantageConfig::default(),
            advantage_scale: 1.0,
        }
    }
}

impl GrpoConfig {
    /// Sequences that a micro-batch has at most.
    pub(crate) fn micro_batch_sequences(&self) -> usize {
        let groups = self.prompts_per_step.div_ceil(self.steps_per_generation);
        (groups * self.num_generations).div_ceil(self.gradient_accumulation_steps)
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
    /// The loss configuration with what follows from the rollout filled in: `temperature`, and the
    /// `max_completion_length` that dr_grpo divides by.
    pub fn loss(&self) -> LossConfig {
        let mut loss = self.loss.clone();
        loss.temperature = self.rollout.temperature;
        loss.max_completion_length.get_or_insert(self.rollout.max_completion_length);
        loss
    }
}
