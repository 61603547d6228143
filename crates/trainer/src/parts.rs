//! The parts of a run behind their traits, and those that a configuration names.

use crate::backends;
use crate::error::Result;
use crate::train_config::{ModelSource, TrainConfig};
use data::{Dataset, TaskMixture};
use models::{CharTokenizer, Tokenizer};
use policy::{Policy, PolicyEngine, RolloutEngine};
use policy_burn::{BurnPolicy, PolicyLoss};
use rewards::Rewards;

/// Everything that [`crate::Trainer`] works with, each replaceable by one of your own.
///
/// ```no_run
/// use std::sync::Arc;
/// use trainer::{Parts, TrainConfig, Trainer};
///
/// # fn main() -> trainer::Result<()> {
/// let config = TrainConfig::default();
/// let mut parts = Parts::from_config(&config)?;
/// let words = Arc::new(data::task::Reverse { min_length: 2, max_length: 4 });
/// parts.dataset = Box::new(data::TaskMixture::from_tasks(vec![(words, 1.0)], 0.1, config.seed)?);
/// let run = Trainer::with_parts(config, parts)?;
/// # Ok(())
/// # }
/// ```
pub struct Parts {
    /// The policy that is trained, with its loss and its optimizer.
    pub policy: Box<dyn Policy>,
    /// The tokenizer of the policy.
    pub tokenizer: Box<dyn Tokenizer>,
    /// The problems.
    pub dataset: Box<dyn Dataset>,
    /// The reward functions with their weights.
    pub rewards: Rewards,
    /// The engine that samples completions.
    pub engine: Box<dyn RolloutEngine>,
}

impl Parts {
    /// The parts that a configuration names: a decoder in burn, the character tokenizer, the built-in tasks and rewards, and
    /// sampling where the weights are.
    ///
    /// # Errors
    /// Those of [`TrainConfig::validate`] and [`backends::open`].
    pub fn from_config(config: &TrainConfig) -> Result<Self> {
        Self::with_tokenizer(config, Box::new(CharTokenizer))
    }

    /// The same with a tokenizer of your own, of as many tokens as `model.vocab_size`.
    ///
    /// # Errors
    /// As [`Parts::from_config`].
    pub fn with_tokenizer(config: &TrainConfig, tokenizer: Box<dyn Tokenizer>) -> Result<Self> {
        let ModelSource::New(shape) = &config.model else { todo!() };
        config.validate_for(tokenizer.vocab_size(), shape.max_position_embeddings)?;
        // Before a plugin is loaded.
        let (dataset, rewards) = (TaskMixture::new(&config.data, config.seed)?, Rewards::new(&config.rewards)?);
        let loss = PolicyLoss {
            config: config.loss(),
            backend: backends::open(&config.grpo.backend, config.grpo.plugin.as_deref())?,
            implementation: config.grpo.implementation,
            max_tokens: config.grpo.micro_batch_sequences() * config.rollout.max_completion_length,
        };
        let policy = BurnPolicy::new(shape, config.seed, loss)?;
        Ok(Self {
            policy: Box::new(policy.with_rollout_batch_size(config.rollout.batch_size)),
            tokenizer,
            dataset: Box::new(dataset),
            rewards,
            engine: Box::new(PolicyEngine),
        })
    }
}
