//! The checks of a run that come before its weights are read.

use crate::adapter;
use crate::engine::engine;
use crate::error::{Error, Result};
use crate::eval::PassRule;
use crate::factory::{Parts, PolicyTarget};
use crate::pretrained::{Purpose, open_described, with_weights};
use crate::prompts::{check_rows, open_data, open_tokenizer};
use crate::trainer::{Rows, Trainer, leads};
use grpo_agents::{Endpoint, Environments};
use grpo_data::{DataReport, Dataset, RowIndex};
use grpo_distributed::Store;
use grpo_models::{CharTokenizer, ChatTemplate, MemoryTable, ModelConfig, ModelFolder, Tokenizer, Trained};
use grpo_policy::RolloutEngine;
use grpo_rewards::Rewards;
use grpo_rollout::encode_prompt;
use grpo_run_config::{ModelSource, TrainConfig, check};
use std::sync::Arc;

/// The number of prompts in the sample that estimates the longest prompt.
const PROMPTS: usize = 32;

/// A run that passed all checks that need no weights: configuration, files and their columns, held-out rows, reward functions, lengths of
/// prompts and completions, memory. For a model on the hub, the checks download only its configuration and tokenizer.
///
/// ```no_run
/// use grpo_trainer::{Prepared, TrainConfig};
///
/// let prepared = Prepared::new(TrainConfig::default())?;
/// println!("{} weights", prepared.overview().weights);
/// let trainer = prepared.trainer()?; // weights are read here
/// # Ok::<(), grpo_trainer::Error>(())
/// ```
pub struct Prepared {
    config: TrainConfig,
    shape: ModelConfig,
    model: Option<ModelFolder>,
    tokenizer: Box<dyn Tokenizer>,
    dataset: Box<dyn Dataset>,
    rewards: Rewards,
    environments: Environments,
    endpoint: Option<Endpoint>,
    rows: Rows,
    place: PolicyTarget,
    overview: Overview,
    engine: Box<dyn RolloutEngine>,
    store: Option<Arc<Store>>,
}

/// Facts about a run that its configuration does not contain.
#[derive(Clone, Debug)]
pub struct Overview {
    /// The number of weights of the model.
    pub weights: u64,
    /// The number of trained weights: all weights of the model, or the adapters' weights.
    pub trained_weights: u64,
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// The number of tokens of the longest of some prompts.
    pub longest_prompt: usize,
    /// `true` if the chat template of the model renders prompts; `None` without prompts.
    pub renders_template: Option<bool>,
    /// `true` if the chat template rewrites earlier turns: conversations are rendered anew, and have several rows.
    pub rewrites_history: bool,
    /// The counts of used and dropped rows of files; `None` if tasks make the problems.
    pub rows: Option<DataReport>,
    /// The number of rows of an evaluation; 0 where evaluation is off.
    pub held_out: usize,
    /// The reward functions with their weights.
    pub rewards: Vec<(String, f32)>,
    /// The completions that count as passed in pass@1.
    pub pass_rule: PassRule,
    /// The memory that the training needs, by part.
    pub memory: MemoryTable,
    /// The available memory in bytes, if the system or the device reports it.
    pub available_memory: Option<u64>,
}

impl Prepared {
    /// Checks a configuration and opens its files, reward functions and device. No weights are read.
    ///
    /// # Errors
    /// * the errors of [`TrainConfig::validate`];
    /// * files or rows that cannot be used, and reward functions that fail on a row;
    /// * a device or model that is not found;
    /// * a training that does not fit into memory.
    pub fn new(config: TrainConfig) -> Result<Self> {
        Self::make(config, None, true, true, None, None)
    }

    /// Like [`Prepared::new`], in one of the processes of a run: all of them call it, because they open the devices of one mesh together.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`]; [`Error::Policy`] if another process fails.
    pub fn in_process(config: TrainConfig, store: Option<Arc<Store>>) -> Result<Self> {
        Self::make(config, None, true, true, None, store)
    }

    /// Like [`Prepared::new`], for callers that replace parts: rewards are not checked against rows.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`].
    pub(crate) fn unchecked(config: TrainConfig, tokenizer: Option<Box<dyn Tokenizer>>) -> Result<Self> {
        Self::make(config, tokenizer, false, true, None, None)
    }

    /// The same for a run that goes on: what its configuration leaves out is not filled in, and the rows of its files are not read again where
    /// there is an index of them.
    ///
    /// # Errors
    /// As [`Prepared::in_process`].
    pub fn resumed(config: TrainConfig, index: Option<RowIndex>, store: Option<Arc<Store>>) -> Result<Self> {
        Self::make(config, None, true, false, index, store)
    }

    fn make(
        mut config: TrainConfig,
        tokenizer: Option<Box<dyn Tokenizer>>,
        checks: bool,
        is_new: bool,
        index: Option<RowIndex>,
        store: Option<Arc<Store>>,
    ) -> Result<Self> {
        config.validate_sources()?;
        crate::datasets::expand_paths(&mut config.data)?;
        if let ModelSource::Pretrained(name) = &mut config.model {
            *name = grpo_data::at_home(name.as_str().as_ref()).to_string_lossy().into_owned();
        }
        adapter::resolve(&mut config)?;
        config.data.check_files()?;
        let rewards = Rewards::with_seed(&config.rewards, config.seed)?;
        let leads = leads(store.as_ref());
        // Only the leader runs environments.
        let mut environments = match leads {
            true => Environments::new(&config.environments)?,
            false => Environments::described(&config.environments)?,
        };
        let pass_rule = if checks { PassRule::of(&config, &rewards)? } else { PassRule::Sum };
        let described = open_described(&config)?;
        let tokenizer = match (tokenizer, &described) {
            (Some(tokenizer), _) => tokenizer,
            (None, None) => Box::new(CharTokenizer),
            (None, Some(model)) => {
                config = config.with_generation_defaults(model.generation());
                if is_new {
                    config = config.with_stop_strings(model.generation());
                }
                let tokenizer = open_tokenizer(model, &config.data)?;
                let is_dated = tokenizer.writes_date() && !config.data.files.is_empty();
                if is_new && is_dated && config.data.template_date.is_none() {
                    let expected = "the date that the chat template writes: several processes would read their clocks at different times";
                    check(store.is_none(), "data.template_date", expected, "null")?;
                    let now = ChatTemplate::now();
                    config.data.template_date = Some(now.clone());
                    Box::new(tokenizer.with_template_date(&now)?)
                } else {
                    Box::new(tokenizer)
                }
            }
        };
        let shape = described.as_ref().map(ModelFolder::config).or(config.model.shape()).cloned();
        let Some(shape) = shape else { return Err(Error::argument("Prepared", "a model", "none")) };
        let context = shape.max_position_embeddings;
        config = config.with_context(context);
        config.validate_for(tokenizer.vocab_size(), context)?;
        config.validate_masks()?;
        check_routers(&config, &shape)?;
        // Checked before a plugin is loaded.
        grpo_planner::policy_options(&config, &shape)?;
        let adapters = match grpo_planner::trained(&config, &shape)? {
            Trained::Adapters { weights, .. } => Some(weights),
            Trained::All => None,
        };
        let longest = context.saturating_sub(config.rollout.max_completion_length());
        let (dataset, report) = open_data(&config.data, config.seed, &*tokenizer, longest, index)?;
        if let Some(report) = &report {
            config.grpo.count_epochs(report.training());
            check_rows(&config.data, report, &rewards, tokenizer.has_chat_template())?;
        }
        match &report {
            Some(report) if report.dropped() > 0 => tracing::warn!("{report}"),
            Some(report) => tracing::info!("{report}"),
            None => {}
        }
        let rows = match checks {
            true => Rows::checked(&config, &*tokenizer, context, &*dataset, &rewards, report.is_some(), leads)?
                .with_environments(&config, &*tokenizer, context, &mut environments, store.as_deref())?,
            false => Rows::default(),
        };
        // The memory table assumes the longest prompt: of all rows of files, or of a sample from tasks.
        let seen = dataset.probe(if report.is_some() { 1 } else { PROMPTS })?;
        let longest_prompt = match &report {
            Some(report) => report.longest_prompt(),
            None => {
                let lengths = seen.iter().map(|item| Ok(encode_prompt(&*tokenizer, &item.prompt)?.len()));
                lengths.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0)
            }
        };
        let longest_prompt = longest_prompt + rows.checked.added_tokens;
        // A conversation that an environment or an agent begins with a longer prompt fails by itself, if the servers lack the room.
        let of_rows = longest_prompt;
        // Agents write their prompts, of any length for which there is room. A conversation that is rendered anew is a prompt.
        let longest_prompt = match environments.has_agents() || rows.checked.rewrites_history {
            true => longest_prompt.max(grpo_planner::longest_prompt(&config, &shape)),
            false => longest_prompt,
        };
        let endpoint = match leads && environments.has_agents() {
            true => Some(crate::engine::endpoint(&config)?),
            false => None,
        };
        let engine = engine(&config, described.as_ref(), of_rows, store.as_deref())?;
        let place = PolicyTarget::open(&config, &shape, longest_prompt, store.as_ref())?;
        let model = described.map(|described| with_weights(described, &config)).transpose()?;
        let (memory, available) = place.memory(&config, &shape, model.as_ref(), longest_prompt)?;
        let name = match &config.model {
            ModelSource::Pretrained(name) => name,
            ModelSource::New(_) => "a new model",
        };
        tracing::info!("{name}; training takes, with prompts of up to {longest_prompt} tokens:\n{memory}");
        place.check(&memory, available)?;
        let overview = Overview {
            weights: shape.parameter_count(),
            trained_weights: adapters.unwrap_or(shape.parameter_count()),
            context,
            longest_prompt,
            renders_template: seen.first().map(|item| item.prompt.is_rendered()),
            rewrites_history: rows.checked.rewrites_history,
            rows: report,
            held_out: rows.held_out.len(),
            rewards: rewards.names().map(str::to_owned).zip(rewards.weights()).collect(),
            pass_rule,
            memory,
            available_memory: available,
        };
        Ok(Self {
            config,
            shape,
            model,
            tokenizer,
            dataset,
            rewards,
            environments,
            endpoint,
            rows,
            place,
            overview,
            engine,
            store,
        })
    }

    /// Returns the configuration, including settings from the model's folder.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Returns facts about the run.
    pub fn overview(&self) -> &Overview {
        &self.overview
    }

    /// Reads the weights and returns the parts of the run.
    ///
    /// # Errors
    /// Weights that cannot be used; a device that fails.
    pub fn parts(self) -> Result<Parts> {
        Ok(self.load()?.1)
    }

    /// Reads the weights and returns a trainer at step 0.
    ///
    /// # Errors
    /// The errors of [`Prepared::parts`], and the errors of [`Trainer::with_parts`] about the policy.
    pub fn trainer(self) -> Result<Trainer> {
        let (config, parts, rows, overview) = self.load()?;
        Trainer::begin(config, parts, rows, Some(overview))
    }

    fn load(self) -> Result<(TrainConfig, Parts, Rows, Overview)> {
        let (config, model) = (self.config, self.model.as_ref());
        let mut policy = self.place.policy(&config, &self.shape, model, Purpose::Training)?;
        adapter::start(&config, &self.shape, model, &mut *policy)?;
        let parts = Parts {
            policy,
            tokenizer: self.tokenizer,
            dataset: self.dataset,
            rewards: self.rewards,
            engine: self.engine,
            environments: self.environments,
            endpoint: self.endpoint,
            store: self.store,
        };
        Ok((config, parts, self.rows, self.overview))
    }
}

/// Checks that keys of routers belong to a model with experts.
///
/// # Errors
/// [`grpo_run_config::Error::Key`].
fn check_routers(config: &TrainConfig, shape: &ModelConfig) -> Result<()> {
    let has_router = shape.experts.is_some() || !config.policy.freeze_router;
    check(has_router, "policy.freeze_router", "false, or a model with a mixture of experts", true)?;
    let has_router = shape.experts.is_some() || !config.policy.replay_routing;
    check(has_router, "policy.replay_routing", "false, or a model with a mixture of experts", true)?;
    let coef = config.policy.router_aux_loss_coef;
    let has_router = shape.experts.is_some() || coef == 0.0;
    Ok(check(has_router, "policy.router_aux_loss_coef", "0, or a model with a mixture of experts", coef)?)
}
