//! Everything a run depends on, with TRL's names wherever TRL has the knob.
//!
//! Every field serialises and every struct has a default, so that a configuration is "the default with these keys
//! changed" and a resolved configuration reproduces its run.

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator};
use grpo_core::{Implementation, LossConfig};
use serde::{Deserialize, Serialize};

pub use crate::model::ModelConfig;
pub use crate::run::options::RunOptions;

/// Most sequences of a step or an evaluation.
const MAX_SEQUENCES: usize = 1 << 20;
/// Longest word or list of digits that a task asks for.
const MAX_LENGTH: usize = 1 << 10;

/// A whole run: all that its numbers depend on, and `run`, on which they do not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// What is saved and shown; the numbers do not depend on it.
    pub run: RunOptions,
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
            implementation: Implementation::default(),
            advantages: AdvantageConfig::default(),
            advantage_scale: 1.0,
        }
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

    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key and says why; [`Error::Loss`] for the loss section.
    pub fn validate(&self) -> Result<()> {
        self.run.validate()?;
        self.model.validate()?;
        let vocab = Tokenizer::VOCAB_SIZE;
        check(
            self.model.vocab_size == vocab,
            "model.vocab_size",
            &format!("the tokenizer's {vocab}"),
            self.model.vocab_size,
        )?;
        self.data.validate()?;
        self.optimizer.validate("optimizer")?;
        self.warmup.optimizer.validate("warmup.optimizer")?;
        if let Some(target) = self.warmup.until_pass_at_1 {
            check((0.0..=1.0).contains(&target), "warmup.until_pass_at_1", "in [0, 1]", target)?;
        }
        for (key, weight) in [
            ("rewards.correct", self.rewards.correct),
            ("rewards.partial", self.rewards.partial),
            ("rewards.terminated", self.rewards.terminated),
            ("grpo.advantage_scale", self.grpo.advantage_scale),
        ] {
            check(weight.is_finite(), key, "a finite number", weight)?;
        }
        let t = self.rollout.temperature;
        check(t.is_finite() && t > 0.0, "rollout.temperature", "a number above 0", t)?;
        check(
            self.loss.temperature == LossConfig::default().temperature || self.loss.temperature == t,
            "loss.temperature",
            "the value of rollout.temperature (or leave it out: the loss is taken at the sampling temperature)",
            self.loss.temperature,
        )?;
        // Far above what this trainer can train and far below what would overflow an allocation.
        for (key, count, limit) in [
            ("warmup.batch_size", self.warmup.batch_size, MAX_SEQUENCES),
            ("rollout.max_completion_length", self.rollout.max_completion_length, usize::MAX),
            ("rollout.batch_size", self.rollout.batch_size, usize::MAX),
            ("grpo.prompts_per_step", self.grpo.prompts_per_step, MAX_SEQUENCES),
            ("grpo.num_generations", self.grpo.num_generations, MAX_SEQUENCES),
            ("grpo.num_iterations", self.grpo.num_iterations, 1 << 10),
            ("grpo.steps_per_generation", self.grpo.steps_per_generation, MAX_SEQUENCES),
            ("grpo.gradient_accumulation_steps", self.grpo.gradient_accumulation_steps, usize::MAX),
            ("eval.num_problems", self.eval.num_problems, MAX_SEQUENCES),
        ] {
            check(count > 0, key, "at least 1", count)?;
            check(count <= limit, key, &format!("at most {limit}"), count)?;
        }
        for (key, groups, per_group) in [
            ("grpo.num_generations", self.grpo.prompts_per_step, self.grpo.num_generations),
            ("eval.num_generations", self.eval.num_problems, self.eval.num_generations),
        ] {
            let expected = format!("at most {MAX_SEQUENCES} sequences in all");
            let few = groups.checked_mul(per_group).is_some_and(|all| all <= MAX_SEQUENCES);
            check(few, key, &expected, format!("{per_group} for each of {groups} prompts"))?;
        }
        // A prompt has two tokens at least, and the last token of a completion is never fed back.
        let positions = self.model.max_position_embeddings;
        check(
            self.rollout.max_completion_length < positions,
            "rollout.max_completion_length",
            &format!("less than model.max_position_embeddings, {positions}"),
            self.rollout.max_completion_length,
        )?;
        let splits = self.grpo.steps_per_generation;
        check(
            self.grpo.prompts_per_step.is_multiple_of(splits),
            "grpo.steps_per_generation",
            "a divisor of grpo.prompts_per_step",
            splits,
        )?;
        check(
            self.loss.num_items_in_batch.is_none(),
            "loss.num_items_in_batch",
            "nothing: the trainer counts the tokens of each generation batch",
            self.loss.num_items_in_batch.unwrap_or_default(),
        )?;
        let compares = matches!(
            self.grpo.advantages.estimator,
            AdvantageEstimator::Group | AdvantageEstimator::MeanOnly | AdvantageEstimator::Rloo
        );
        check(
            !compares || self.grpo.num_generations > 1,
            "grpo.num_generations",
            "at least 2: these advantages compare the completions of one prompt",
            self.grpo.num_generations,
        )?;
        self.loss().validate()?;
        Ok(())
    }
}

impl DataConfig {
    fn validate(&self) -> Result<()> {
        let f = self.held_out_fraction;
        check(f > 0.0 && f < 1.0, "data.held_out_fraction", "strictly between 0 and 1", f)?;
        let t = &self.tasks;
        let weights = [
            ("data.tasks.addition.weight", t.addition.weight),
            ("data.tasks.comparison.weight", t.comparison.weight),
            ("data.tasks.sorting.weight", t.sorting.weight),
            ("data.tasks.reverse.weight", t.reverse.weight),
            ("data.tasks.countdown.weight", t.countdown.weight),
        ];
        for (key, weight) in weights {
            check(weight.is_finite() && weight >= 0.0, key, "a finite number >= 0", weight)?;
        }
        for (key, min, max) in [
            ("data.tasks.sorting", t.sorting.min_length, t.sorting.max_length),
            ("data.tasks.reverse", t.reverse.min_length, t.reverse.max_length),
        ] {
            let expected = format!("1 <= min_length <= max_length <= {MAX_LENGTH}");
            check(1 <= min && min <= max && max <= MAX_LENGTH, key, &expected, format!("{min} and {max}"))?;
        }
        for (key, n) in [
            ("data.tasks.addition.max_number", t.addition.max_number),
            ("data.tasks.comparison.max_number", t.comparison.max_number),
            ("data.tasks.countdown.max_number", t.countdown.max_number),
        ] {
            check((1..=999_999).contains(&n), key, "between 1 and 999999", n)?;
        }
        check((2..=4).contains(&t.countdown.count), "data.tasks.countdown.count", "between 2 and 4", t.countdown.count)
    }
}

impl OptimizerConfig {
    fn validate(&self, section: &str) -> Result<()> {
        let unit = 0.0..=1.0;
        let positive = |x: f64| x.is_finite() && x >= 0.0;
        for (name, ok, expected, value) in [
            ("learning_rate", positive(self.learning_rate), "a finite number >= 0", self.learning_rate),
            ("adam_beta1", (0.0..1.0).contains(&self.adam_beta1), "in [0, 1)", self.adam_beta1),
            ("adam_beta2", (0.0..1.0).contains(&self.adam_beta2), "in [0, 1)", self.adam_beta2),
            (
                "adam_epsilon",
                self.adam_epsilon.is_finite() && self.adam_epsilon > 0.0,
                "a number above 0",
                self.adam_epsilon,
            ),
            ("weight_decay", positive(self.weight_decay), "a finite number >= 0", self.weight_decay),
            ("max_grad_norm", positive(self.max_grad_norm), "a finite number >= 0", self.max_grad_norm),
            ("warmup_ratio", unit.contains(&self.warmup_ratio), "in [0, 1]", self.warmup_ratio),
            ("min_lr_ratio", unit.contains(&self.min_lr_ratio), "in [0, 1]", self.min_lr_ratio),
        ] {
            check(ok, &format!("{section}.{name}"), expected, value)?;
        }
        Ok(())
    }
}

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
