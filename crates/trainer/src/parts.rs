//! The replaceable parts of a run.

use grpo_agents::{Endpoint, Environments};
use grpo_conversations::Rollout;
use grpo_data::Dataset;
use grpo_distributed::Store;
use grpo_models::Tokenizer;
use grpo_policy::{Policy, PolicyEngine, RolloutEngine};
use grpo_rewards::Rewards;
use grpo_run_config::TrainConfig;
use std::sync::Arc;

/// The parts that [`crate::Trainer`] works with; each can be replaced by your own.
///
/// `examples/embed/with_parts` is a complete program; `grpo_setup::parts` returns the parts that a configuration names.
#[non_exhaustive]
pub struct Parts {
    /// The policy that is trained, with its loss and its optimizer.
    pub policy: Box<dyn Policy>,
    /// The tokenizer of the policy.
    pub tokenizer: Box<dyn Tokenizer>,
    /// The data set of problems.
    pub dataset: Box<dyn Dataset>,
    /// The reward functions with their weights.
    pub rewards: Rewards,
    /// The engine that samples completions.
    pub engine: Box<dyn RolloutEngine>,
    /// The environments of conversations; without one, a completion is one message.
    pub environments: Environments,
    /// The endpoint of agents; the trainer opens it at `rollout.endpoint` if the environments have agents, in process 0.
    pub endpoint: Option<Endpoint>,
    /// The connection to the other processes of the run, if it has several. Process 0 runs the environments of all and scores their completions.
    pub store: Option<Arc<Store>>,
}

impl Parts {
    /// Creates parts from your own policy, tokenizer, data and rewards. The policy samples its completions itself, and there is no
    /// environment, unless other parts are set.
    pub fn new(
        policy: impl Policy + 'static,
        tokenizer: impl Tokenizer + 'static,
        dataset: impl Dataset + 'static,
        rewards: Rewards,
    ) -> Self {
        Self::from_boxed(Box::new(policy), Box::new(tokenizer), Box::new(dataset), rewards)
    }

    /// Like [`Parts::new`], from parts whose types are not known.
    pub fn from_boxed(
        policy: Box<dyn Policy>,
        tokenizer: Box<dyn Tokenizer>,
        dataset: Box<dyn Dataset>,
        rewards: Rewards,
    ) -> Self {
        Self {
            policy,
            tokenizer,
            dataset,
            rewards,
            engine: Box::new(PolicyEngine),
            environments: Environments::default(),
            endpoint: None,
            store: None,
        }
    }

    /// Sets the engine that samples completions.
    #[must_use]
    pub fn with_engine(self, engine: impl RolloutEngine + 'static) -> Self {
        Self { engine: Box::new(engine), ..self }
    }

    /// Sets the environments of conversations.
    #[must_use]
    pub fn with_environments(self, environments: Environments) -> Self {
        Self { environments, ..self }
    }

    /// Sets the endpoint of agents.
    #[must_use]
    pub fn with_endpoint(self, endpoint: Endpoint) -> Self {
        Self { endpoint: Some(endpoint), ..self }
    }

    /// Sets the connection to the other processes of the run.
    #[must_use]
    pub fn with_store(self, store: Arc<Store>) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Returns what samples the completions of a run.
    pub(crate) fn rollout<'a>(&'a mut self, config: &'a TrainConfig) -> Rollout<'a> {
        let Self { policy, tokenizer, engine, environments, endpoint, store, .. } = self;
        Rollout {
            policy: &mut **policy,
            engine: &mut **engine,
            tokenizer: &**tokenizer,
            environments,
            endpoint: endpoint.as_ref(),
            store: store.as_deref(),
            history: config.data.history,
            max_prompt_length: config.data.max_prompt_length,
            return_routed_experts: config.policy.replay_routing,
            config: &config.rollout,
        }
    }
}
