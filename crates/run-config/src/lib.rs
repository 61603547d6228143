#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod advice;
mod distributed;
mod error;
mod export;
mod grpo;
pub mod keys;
mod layers;
mod mesh;
mod model;
mod multi_turn;
mod optimizer;
mod policy;
mod run;
#[cfg(test)]
mod tests;
mod validate;

use grpo_agents::EnvironmentConfig;
use grpo_core::{LossAggMode, LossConfig};
use grpo_data::DataConfig;
use grpo_models::{GenerationDefaults, LoraConfig, OptimizerName, TrainedMemory};
use grpo_policy::{LogitsProcessors, Sampling};
use grpo_rewards::RewardConfig;
use grpo_rng::Purpose;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::collections::BTreeMap;

pub use self::policy::{
    ExpertProducts, PolicyAttention, PolicyConfig, PolicyDevice, PolicyDtype, RecomputeGranularity,
};
pub use distributed::DistributedConfig;
pub use error::{Error, Result, check};
pub use export::ExportConfig;
pub use grpo::{FilterGroupsConfig, GrpoConfig, KlControlConfig, KlControlType, REWARD};
pub use grpo_engines::{EngineKind, ServerConfig};
pub use grpo_sinks::wandb::Mode as WandbMode;
pub use grpo_sinks::{LoggingConfig, WandbConfig};
pub use layers::WITHOUT_MODEL;
pub use mesh::{LogicalAxisRules, MeshAxis, MeshChoice, MeshConfig};
pub use model::ModelSource;
pub use multi_turn::{MultiTurnConfig, TruncateSide};
pub use optimizer::{LrSchedulerKwargs, LrSchedulerType, OptimizerConfig};
pub use run::RunOptions;
pub use validate::MAX_SEQUENCES;

/// The configuration of a run: everything that its results depend on, and `run`, `logging` and `wandb`, which do not change a step.
///
/// `Default` has the settings for pretrained models, with TRL's values for TRL's options, but no model and no data, which every run has to
/// name. [`TrainConfig::built_in`] is the complete configuration of a small run; [`TrainConfig::from_layers`] reads files.
///
/// ```
/// use grpo_run_config::{ModelSource, TrainConfig};
///
/// let mut config = TrainConfig { model: ModelSource::Pretrained("path/to/model".into()), ..Default::default() };
/// config.data.files = vec![grpo_data::DataFile::new("train.jsonl")];
/// config.grpo.num_generations = 16;
/// config.validate()?;
/// # Ok::<(), grpo_run_config::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// The section `run`: checkpoints, logs and early stopping.
    pub run: RunOptions,
    /// The section `logging`: logs in addition to metrics.jsonl.
    pub logging: LoggingConfig,
    /// The section `wandb`: metrics for Weights & Biases.
    pub wandb: WandbConfig,
    /// The seed of all random numbers: weights, problems, samples.
    pub seed: u64,
    /// The model: a folder or a name on Hugging Face, or the section `model` with the shape of a new one.
    pub model: ModelSource,
    /// The branch, tag or commit of a model on Hugging Face; `None` is `main`, or the cached revision.
    pub model_revision: Option<String>,
    /// The device that holds the weights, and its options.
    pub policy: PolicyConfig,
    /// The processes of a run on several hosts.
    pub distributed: DistributedConfig,
    /// LoRA: trains adapters and freezes the model's weights; `None` trains the weights.
    pub lora: Option<LoraConfig>,
    /// The training and held-out problems.
    pub data: DataConfig,
    /// The environments of conversations, by name: tools or games that answer the model. Without one, a completion is one message. A row names its
    /// environment in the column `environment`, unless there is only one.
    pub environments: BTreeMap<String, EnvironmentConfig>,
    /// The reward functions with their weights. The default is `correct: 1`; a section replaces it by all rewards of the run.
    #[default(RewardConfig { correct: 1.0, ..RewardConfig::default() })]
    pub rewards: RewardConfig,
    /// The supervised steps before GRPO.
    pub warmup: WarmupConfig,
    /// The sampling of completions.
    pub rollout: RolloutConfig,
    /// The GRPO loop around the loss.
    pub grpo: GrpoConfig,
    /// The GRPO loss. Its `temperature` and `max_completion_length` follow [`RolloutConfig`]; see [`TrainConfig::loss`].
    pub loss: LossConfig,
    /// The optimizer and its schedule during GRPO.
    pub optimizer: OptimizerConfig,
    /// The evaluation on held-out problems.
    pub eval: EvalConfig,
    /// The model folder that the run exports.
    pub export: ExportConfig,
}

/// A short supervised phase (cross-entropy on reference answers), so that the first rewards are not all zero.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupConfig {
    /// The maximum number of optimizer steps; 0, the default, skips the phase.
    pub steps: u64,
    /// The share of correct greedy answers to some training problems at which the phase ends early. The effect of a number of steps differs
    /// between seeds, and GRPO needs rewards that are neither all 0 nor all 1.
    pub until_pass_at_1: Option<f64>,
    /// The number of problems per step.
    #[default(8)]
    pub batch_size: usize,
    /// The optimizer and its schedule during the warm-up.
    // The default of TRL's SFTConfig.
    #[default(OptimizerConfig { learning_rate: 2e-5, ..OptimizerConfig::default() })]
    pub optimizer: OptimizerConfig,
}

/// The settings of rollouts.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// The softmax temperature T > 0 of sampling, 1 if `None`; the loss uses the same.
    pub temperature: Option<f64>,
    /// The number of most probable tokens to sample from; 0 and `None` disable it.
    ///
    /// This and the next three options work as in `transformers`, see [`grpo_policy::LogitsProcessors`]. The loss uses the whole softmax at the
    /// temperature, as in TRL, so its probabilities differ from those of a truncated sampling distribution: a run that sets one of the four
    /// without `replay_sampling_mask` logs a warning.
    pub top_k: Option<usize>,
    /// The probability mass of the most probable tokens to sample from (nucleus sampling); 1 and `None` disable it.
    pub top_p: Option<f64>,
    /// The minimum probability of a token relative to the most probable one; 0 and `None` disable it.
    pub min_p: Option<f64>,
    /// The divisor of positive logits, and factor of negative ones, of tokens in the prompt and completion; 1 and `None` disable it.
    pub repetition_penalty: Option<f64>,
    /// `true` if log-probabilities of the sampler, of scores and of the loss are over the ids that `top_k`, `top_p` and `min_p` kept for each
    /// token. This is DeepSeek-V3.2's "keep sampling mask": the probabilities of the loss are those that tokens were sampled with, and the
    /// entropy and the KL are those of the truncated distributions.
    pub replay_sampling_mask: bool,
    /// `true` if unset keys among `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` get the values of the model's
    /// generation_config.json, unless its `do_sample` is false.
    pub use_generation_config: bool,
    /// The maximum number of tokens of a completion, including EOS. `None` is 512 or, in a shorter context, the rest after
    /// `data.max_prompt_length`, at least half of the context; without that limit, half of the context.
    pub max_completion_length: Option<usize>,
    /// The ids of tokens that end a completion, in addition to the stop tokens of the model's generation_config.json and tokenizer.
    pub stop_token_ids: Vec<u32>,
    /// The texts that end a completion: the token that completes one of them is the last. The completion keeps the text, and the loss
    /// includes all sampled tokens. `None` is `stop_strings` of the model's generation_config.json; an empty list disables it.
    pub stop: Option<Vec<String>>,
    /// The maximum number of sequences that decode in parallel. It limits memory and does not change results.
    #[default(256)]
    pub batch_size: usize,
    /// The limits of conversations with `environments`.
    pub multi_turn: MultiTurnConfig,
    /// The address and the port at which agents ask the policy for messages, such as 127.0.0.1:8000; `None` is a free port that only this
    /// machine reaches.
    pub endpoint: Option<String>,
    /// `true` if the endpoint refuses fields of requests that the run does not honour, such as `seed` or another temperature; `false` if the
    /// run's values replace them, which the log says once.
    pub endpoint_strict: bool,
    /// The mesh of sampling, over the devices of `policy.mesh`: `auto`, or the number of devices along each axis; null is `auto`, as a
    /// rule with tensor = gcd(query heads, devices) and data = the rest.
    pub mesh: Option<MeshChoice>,
    /// The program that samples completions: the policy itself, or servers of vLLM or SGLang.
    pub engine: EngineKind,
    /// The servers of `engine`.
    pub server: Option<ServerConfig>,
    /// The maximum number of GRPO steps between the weights that sampled a completion and the step that trains on it. 0 samples and trains in
    /// turn; from 1 on, servers sample completions of later steps while the policy trains.
    pub max_staleness: u64,
}

/// The default maximum number of tokens of a completion, as in TRL.
const MAX_COMPLETION_LENGTH: usize = 512;

impl RolloutConfig {
    /// Returns the temperature, 1 by default.
    pub fn temperature(&self) -> f64 {
        self.temperature.unwrap_or(1.0)
    }

    /// Returns the maximum number of tokens of a completion, 512 by default. `trainer::Trainer::config` has the value of a run.
    pub fn max_completion_length(&self) -> usize {
        self.max_completion_length.unwrap_or(MAX_COMPLETION_LENGTH)
    }

    /// Returns the logits processors other than the temperature.
    pub fn processors(&self) -> LogitsProcessors {
        let Self { repetition_penalty, top_k, top_p, min_p, .. } = *self;
        LogitsProcessors { repetition_penalty, top_k, top_p, min_p }
    }
}

/// The settings of evaluations on held-out problems, including their sampling.
///
/// ```
/// use grpo_run_config::EvalConfig;
///
/// // pass@1 and pass@8 of 16 completions of every held-out problem, each sampled as Qwen2.5-Instruct's generation_config.json says.
/// let eval = EvalConfig {
///     num_problems: Some(0),
///     num_generations: 16,
///     pass_at: vec![1, 8],
///     temperature: Some(0.7),
///     top_p: Some(0.8),
///     top_k: Some(20),
///     ..Default::default()
/// };
/// # drop(eval);
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// The number of distinct held-out problems; 0 takes all. `None` takes 256, or all if there are fewer. Without held-out rows
    /// (`data.held_out_fraction: 0` and no `data.eval_files`) there is no evaluation.
    pub num_problems: Option<usize>,
    /// The number of sampled completions per problem, for mean rewards and `pass_at`; 0 disables sampling.
    #[default(2)]
    pub num_generations: usize,
    /// The number of GRPO steps between evaluations; 0 evaluates only before the first and after the last step.
    #[default(50)]
    pub eval_steps: u64,
    /// The numbers k for which pass@k is estimated from the sampled completions, at most `num_generations`. Unless 1 is among them, pass@1
    /// uses the greedy completion.
    pub pass_at: Vec<usize>,
    /// The name of the reward function that decides whether a completion passes: it must return at least 1. `reward` is the weighted
    /// sum. `None` is `correct` if it has a weight; otherwise every function with a positive weight (except length penalties) must return at
    /// least 1. `correct` may be named without a weight in the section `rewards`.
    pub pass_reward: Option<String>,
    /// The temperature of sampled completions, 0 for greedy ones. `None` in this and the next four keys is the value of the section
    /// `rollout`.
    pub temperature: Option<f64>,
    /// Like `rollout.top_k`.
    pub top_k: Option<usize>,
    /// Like `rollout.top_p`.
    pub top_p: Option<f64>,
    /// Like `rollout.min_p`.
    pub min_p: Option<f64>,
    /// Like `rollout.repetition_penalty`.
    pub repetition_penalty: Option<f64>,
    /// The maximum number of tokens of a completion in an evaluation; `None` is `rollout.max_completion_length`.
    pub max_completion_length: Option<usize>,
}

/// The default number of held-out problems of an evaluation.
pub const EVAL_PROBLEMS: usize = 256;

impl EvalConfig {
    /// Returns the maximum number of tokens of a completion in an evaluation.
    pub fn max_completion_length(&self, rollout: &RolloutConfig) -> usize {
        self.max_completion_length.unwrap_or(rollout.max_completion_length())
    }

    /// Returns the sampling of evaluations: the keys of this section, or else those of `rollout`. It depends on the seed, not on the step.
    pub fn sampling(&self, rollout: &RolloutConfig, seed: u64) -> Sampling {
        let temperature = self.temperature.unwrap_or(rollout.temperature());
        if temperature == 0.0 {
            return Sampling::Greedy;
        }
        let processors = LogitsProcessors {
            repetition_penalty: self.repetition_penalty.or(rollout.repetition_penalty),
            top_k: self.top_k.or(rollout.top_k),
            top_p: self.top_p.or(rollout.top_p),
            min_p: self.min_p.or(rollout.min_p),
        };
        Sampling::Random { temperature, processors, seed, purpose: Purpose::EvalRollout, step: 0, first: 0 }
    }
}

impl TrainConfig {
    /// Returns the loss configuration completed from other sections: `temperature`, the `max_completion_length` that dr_grpo divides by,
    /// the groups of prompt-mean and token-mean-legacy. With an adaptive entropy bonus, `entropy_coef` is 1 as a marker, because each step
    /// brings its own coefficient; a compiled loss therefore stays valid when it changes. With the servers of
    /// `rollout.engine`, the correction for the sampler is on unless a key switches it off.
    pub fn loss(&self) -> LossConfig {
        let mut loss = self.loss.clone();
        loss.temperature = self.rollout.temperature();
        loss.max_completion_length.get_or_insert(self.rollout.max_completion_length());
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
        if self.rollout.engine.is_server() && loss.rollout_is.is_none() && loss.loss_type.traits().trl_corrects_sampler
        {
            loss.vllm_importance_sampling_correction.get_or_insert(true);
        }
        loss
    }

    /// Returns this configuration for a model with a context of `context` tokens: the default length of completions is set.
    #[must_use]
    pub fn with_context(mut self, context: usize) -> Self {
        let prompt = self.data.max_prompt_length.unwrap_or(context).min(context / 2);
        self.rollout.max_completion_length.get_or_insert(MAX_COMPLETION_LENGTH.min(context - prompt).max(1));
        self
    }

    /// Applies `rollout.use_generation_config`: unset keys get the values of a model's generation_config.json.
    pub fn with_generation_defaults(mut self, defaults: &GenerationDefaults) -> Self {
        if self.rollout.use_generation_config && defaults.do_sample != Some(false) {
            let rollout = &mut self.rollout;
            // 0 means greedy decoding, whose completions carry no training signal.
            rollout.temperature = rollout.temperature.or(defaults.temperature.filter(|temperature| *temperature > 0.0));
            rollout.top_k = rollout.top_k.or(defaults.top_k);
            rollout.top_p = rollout.top_p.or(defaults.top_p);
            rollout.min_p = rollout.min_p.or(defaults.min_p);
            rollout.repetition_penalty = rollout.repetition_penalty.or(defaults.repetition_penalty);
        }
        self
    }

    /// Returns this configuration with `stop_strings` of a model's generation_config.json as `rollout.stop`, if that is not set.
    pub fn with_stop_strings(mut self, defaults: &GenerationDefaults) -> Self {
        if self.rollout.stop.is_none() && !defaults.stop_strings.is_empty() {
            self.rollout.stop = Some(defaults.stop_strings.clone());
        }
        self
    }

    /// Returns `true` if the value of the loss reflects training progress. With one update per step, ratios are 1, and a loss without other
    /// terms is the weighted mean of advantages, which is always about 0.
    pub fn loss_says_something(&self) -> bool {
        let loss = &self.loss;
        let has_other_terms = loss.beta != 0.0 || loss.entropy_coef != 0.0 || loss.positive_example_nll_weight != 0.0;
        self.grpo.updates() > 1 || has_other_terms || self.grpo.use_adaptive_entropy || self.grpo.value_loss().is_some()
    }

    /// Returns `true` if the run needs a reference policy: the loss or the reward has a KL term.
    pub fn needs_ref_policy(&self) -> bool {
        self.loss.needs_ref_logp() || self.grpo.use_kl_in_reward
    }

    /// Returns the number of forward passes that score every completion before training: for the old policy and for the reference policy.
    pub fn scorings(&self) -> usize {
        usize::from(self.grpo.scores_old_policy()) + usize::from(self.needs_ref_policy())
    }

    /// Returns the optimizer whose moments need more memory: `optimizer.name`, or that of the warm-up, if there is one.
    pub fn largest_optimizer(&self) -> OptimizerName {
        let warmup = (self.warmup.steps > 0).then_some(&self.warmup.optimizer);
        let names = warmup.into_iter().chain([&self.optimizer]).map(|optimizer| optimizer.settings.name);
        names.max_by_key(|name| TrainedMemory::of(1 << 20, *name).moments).unwrap_or_default()
    }

    /// Returns `true` if the policy saves weights and moments before a step for a rollback: with `policy.can_roll_back`, if steps can fail
    /// after an update. A step that ends with its only update needs no rollback and no memory for it.
    pub fn keeps_state_to_roll_back(&self) -> bool {
        self.policy.can_roll_back && self.grpo.fails_after_an_update()
    }
}
