//! The checks of a run that come before its weights are read.

use crate::adapter;
use crate::engine::engine;
use crate::error::{Error, Result};
use crate::factory::PolicyTarget;
use crate::pretrained::{Purpose, open_described, with_weights};
use crate::prompts::{check_rows, open_data, open_tokenizer};
use grpo_agents::{Endpoint, Environments};
use grpo_conversations::{encode_prompt, lockstep::leads, open_endpoint};
use grpo_data::{DataReport, Dataset, RowIndex};
use grpo_distributed::Store;
use grpo_models::{CharTokenizer, ChatTemplate, ModelConfig, ModelFolder, Tokenizer, Trained};
use grpo_policy::RolloutEngine;
use grpo_rewards::Rewards;
use grpo_run_config::{ModelSource, TrainConfig, check};
use grpo_trainer::{Overview, Parts, Rows, Trainer, eval::PassRule};
use std::sync::Arc;

/// The number of prompts in the sample that estimates the longest prompt.
const PROMPTS: usize = 32;

/// A run that passed all checks that need no weights: configuration, files and their columns, held-out rows, reward functions, lengths of
/// prompts and completions, memory. For a model on the hub, the checks download only its configuration and tokenizer.
///
/// ```no_run
/// use grpo_setup::Prepared;
/// use grpo_trainer::TrainConfig;
///
/// let prepared = Prepared::new(TrainConfig::default())?;
/// println!("{} weights", prepared.overview().weights);
/// let trainer = prepared.trainer()?; // weights are read here
/// # Ok::<(), grpo_setup::Error>(())
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

/// The inputs of [`Prepared::make`], except for the configuration.
#[derive(Default)]
struct Start {
    /// The tokenizer in place of the model's.
    tokenizer: Option<Box<dyn Tokenizer>>,
    /// `true` if reward functions and environments are checked against rows.
    checks: bool,
    /// `true` if missing keys of the configuration are filled in from the model.
    is_new: bool,
    /// The index of the rows of the configuration's files.
    index: Option<RowIndex>,
    store: Option<Arc<Store>>,
}

/// Returns a trainer at step 0 with the parts that a configuration names.
///
/// # Errors
/// The errors of [`Prepared::new`] and [`Prepared::trainer`].
pub fn trainer(config: TrainConfig) -> Result<Trainer> {
    Prepared::new(config)?.trainer()
}

/// Returns the parts that a configuration names: a decoder on the CPU or on a device, pretrained or new, its tokenizer (characters for a new
/// one), data, rewards, and sampling on the policy's device.
///
/// ```no_run
/// use grpo_trainer::{TrainConfig, Trainer};
/// use std::sync::Arc;
///
/// # fn main() -> grpo_setup::Result<()> {
/// let config = TrainConfig::built_in();
/// let mut parts = grpo_setup::parts(&config)?;
/// let words = Arc::new(grpo_data::task::Reverse { min_length: 2, max_length: 4 });
/// parts.dataset = Box::new(grpo_data::TaskMixture::from_tasks(vec![(words, 1.0)], 0.1, config.seed)?);
/// let run = Trainer::with_parts(config, parts)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`Prepared::new`] and [`Prepared::parts`].
pub fn parts(config: &TrainConfig) -> Result<Parts> {
    Prepared::unchecked(config.clone(), None)?.parts()
}

/// Like [`parts`], with your own tokenizer, whose vocabulary size must be `model.vocab_size`.
///
/// # Errors
/// The errors of [`parts`].
pub fn parts_with_tokenizer(config: &TrainConfig, tokenizer: Box<dyn Tokenizer>) -> Result<Parts> {
    Prepared::unchecked(config.clone(), Some(tokenizer))?.parts()
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
        Self::in_process(config, None)
    }

    /// Like [`Prepared::new`], in one of the processes of a run: all of them call it, because they open the devices of one mesh together.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`]; [`grpo_trainer::Error::Policy`] if another process fails.
    pub fn in_process(config: TrainConfig, store: Option<Arc<Store>>) -> Result<Self> {
        Self::make(config, Start { checks: true, is_new: true, store, ..Start::default() })
    }

    /// Like [`Prepared::new`], for callers that replace parts: rewards are not checked against rows.
    ///
    /// # Errors
    /// The errors of [`Prepared::new`].
    fn unchecked(config: TrainConfig, tokenizer: Option<Box<dyn Tokenizer>>) -> Result<Self> {
        Self::make(config, Start { tokenizer, is_new: true, ..Start::default() })
    }

    /// Like [`Prepared::in_process`], for a run that continues: keys that its configuration leaves out are not filled in, and the rows of its
    /// files are not read again if there is an index of them.
    ///
    /// # Errors
    /// The errors of [`Prepared::in_process`].
    pub fn resumed(config: TrainConfig, index: Option<RowIndex>, store: Option<Arc<Store>>) -> Result<Self> {
        Self::make(config, Start { checks: true, index, store, ..Start::default() })
    }

    fn make(mut config: TrainConfig, start: Start) -> Result<Self> {
        let Start { tokenizer, checks, is_new, index, store } = start;
        resolve_sources(&mut config)?;
        let rewards = Rewards::with_seed(&config.rewards, config.seed)?;
        let leads = leads(store.as_deref());
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
            (None, Some(model)) => model_tokenizer(&mut config, model, is_new, store.is_some())?,
        };
        let (shape, trained_weights) = checked_shape(&mut config, described.as_ref(), tokenizer.vocab_size())?;
        let context = shape.max_position_embeddings;
        let (dataset, report) = open_rows(&mut config, &*tokenizer, &rewards, context, index)?;
        let rows = match checks {
            true => Rows::checked(&config, &*tokenizer, context, &*dataset, &rewards, report.is_some(), leads)?
                .with_environments(&config, &*tokenizer, context, &mut environments, store.as_deref())?,
            false => Rows::default(),
        };
        let (of_rows, renders_template) = longest_prompt(&*dataset, report.as_ref(), &*tokenizer)?;
        // A conversation that an environment or an agent begins with a longer prompt fails by itself, if the servers lack the room.
        let of_rows = of_rows + rows.environments().added_tokens;
        // Agents write their prompts, of any length for which there is room. A conversation that is rendered anew is a prompt.
        let rewrites_history = rows.environments().rewrites_history;
        let longest_prompt = match environments.has_agents() || rewrites_history {
            true => of_rows.max(grpo_planner::longest_prompt(&config, &shape)),
            false => of_rows,
        };
        let endpoint = match leads && environments.has_agents() {
            true => Some(open_endpoint(&config.rollout)?),
            false => None,
        };
        let engine = engine(&config, described.as_ref(), of_rows, store.as_deref())?;
        let place = PolicyTarget::open(&config, &shape, longest_prompt, store.as_ref())?;
        let model = described.map(|described| with_weights(described, &config)).transpose()?;
        let (memory, available_memory) = place.memory(&config, &shape, model.as_ref(), longest_prompt)?;
        let name = match &config.model {
            ModelSource::Pretrained(name) => name,
            ModelSource::New(_) => "a new model",
        };
        tracing::info!("{name}; training takes, with prompts of up to {longest_prompt} tokens:\n{memory}");
        place.check(&memory, available_memory)?;
        let overview = Overview {
            weights: shape.parameter_count(),
            trained_weights,
            context,
            longest_prompt,
            renders_template,
            rewrites_history,
            rows: report,
            held_out: rows.num_held_out(),
            rewards: rewards.names().map(str::to_owned).zip(rewards.weights()).collect(),
            pass_rule,
            memory,
            available_memory,
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
        Ok(Trainer::with_checked_rows(config, parts, rows, overview)?)
    }

    fn load(self) -> Result<(TrainConfig, Parts, Rows, Overview)> {
        let (config, model) = (self.config, self.model.as_ref());
        let mut policy = self.place.policy(&config, &self.shape, model, Purpose::Training)?;
        adapter::start(&config, &self.shape, model, &mut *policy)?;
        let mut parts = Parts::from_boxed(policy, self.tokenizer, self.dataset, self.rewards);
        (parts.engine, parts.environments) = (self.engine, self.environments);
        (parts.endpoint, parts.store) = (self.endpoint, self.store);
        Ok((config, parts, self.rows, self.overview))
    }
}

/// Replaces names of data sets, models and adapters in a configuration by paths, and checks that data files exist.
fn resolve_sources(config: &mut TrainConfig) -> Result<()> {
    config.validate_sources()?;
    crate::datasets::expand_paths(&mut config.data)?;
    if let ModelSource::Pretrained(name) = &mut config.model {
        *name = grpo_data::at_home(name.as_str().as_ref()).to_string_lossy().into_owned();
    }
    adapter::resolve(config)?;
    Ok(config.data.check_files()?)
}

/// Returns the tokenizer of a model folder, and copies the folder's generation defaults to the configuration. A new run records the date that
/// the chat template writes.
fn model_tokenizer(
    config: &mut TrainConfig,
    model: &ModelFolder,
    is_new: bool,
    has_processes: bool,
) -> Result<Box<dyn Tokenizer>> {
    let mut filled = config.clone().with_generation_defaults(model.generation());
    if is_new {
        filled = filled.with_stop_strings(model.generation());
    }
    *config = filled;
    let tokenizer = open_tokenizer(model, &config.data)?;
    let is_dated = tokenizer.writes_date() && !config.data.files.is_empty();
    if is_new && is_dated && config.data.template_date.is_none() {
        let expected =
            "the date that the chat template writes: several processes would read their clocks at different times";
        check(!has_processes, "data.template_date", expected, "null")?;
        let now = ChatTemplate::now();
        config.data.template_date = Some(now.clone());
        return Ok(Box::new(tokenizer.with_template_date(&now)?));
    }
    Ok(Box::new(tokenizer))
}

/// Returns the shape of the model and its number of trained weights, after all checks of the configuration against the model, which come before
/// a plugin is loaded.
fn checked_shape(
    config: &mut TrainConfig,
    model: Option<&ModelFolder>,
    vocab_size: usize,
) -> Result<(ModelConfig, u64)> {
    let shape = model.map(ModelFolder::config).or(config.model.shape()).cloned();
    let Some(shape) = shape else { return Err(Error::argument("Prepared", "a model", "none")) };
    let context = shape.max_position_embeddings;
    *config = config.clone().with_context(context);
    config.validate_for(vocab_size, context)?;
    config.validate_masks()?;
    check_routers(config, &shape)?;
    grpo_planner::policy_options(config, &shape)?;
    let trained = match grpo_planner::trained(config, &shape)? {
        Trained::Adapters { weights, .. } => weights,
        Trained::All => shape.parameter_count(),
    };
    Ok((shape, trained))
}

/// Opens the data set, and logs how many rows of its files are used and dropped.
fn open_rows(
    config: &mut TrainConfig,
    tokenizer: &dyn Tokenizer,
    rewards: &Rewards,
    context: usize,
    index: Option<RowIndex>,
) -> Result<(Box<dyn Dataset>, Option<DataReport>)> {
    let longest = context.saturating_sub(config.rollout.max_completion_length());
    let (dataset, report) = open_data(&config.data, config.seed, tokenizer, longest, index)?;
    if let Some(report) = &report {
        config.grpo.count_epochs(report.training());
        check_rows(&config.data, report, rewards, tokenizer.has_chat_template())?;
        match report.dropped() {
            0 => tracing::info!("{report}"),
            _ => tracing::warn!("{report}"),
        }
    }
    Ok((dataset, report))
}

/// Returns the number of tokens of the longest prompt, of all rows of files or of a sample from tasks, and whether the chat template renders
/// prompts.
fn longest_prompt(
    dataset: &dyn Dataset,
    report: Option<&DataReport>,
    tokenizer: &dyn Tokenizer,
) -> Result<(usize, Option<bool>)> {
    let seen = dataset.probe(if report.is_some() { 1 } else { PROMPTS })?;
    let longest = match report {
        Some(report) => report.longest_prompt(),
        None => {
            let lengths = seen.iter().map(|item| Ok(encode_prompt(tokenizer, &item.prompt)?.len()));
            lengths.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0)
        }
    };
    Ok((longest, seen.first().map(|item| item.prompt.is_rendered())))
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
