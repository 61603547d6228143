//! A run, one step at a time: warm-up, then GRPO.

mod state;

pub use state::{Counters, TrainState};

use crate::ahead::Ahead;
use crate::coefficients::Coefficients;
use crate::drift::Drift;
use crate::error::{Error, Result};
use rollout::{check_environments, encode_prompt};

use crate::eval::{EvalReport, PassRule, evaluate, greedy};
use crate::factory::Parts;
use crate::prepared::{Overview, Prepared};
use crate::step::{StepContext, StepReport, grpo_step};
use crate::updates::Updates;
use crate::warmup::{WarmupReport, warmup_step};
use agents::{Endpoint, Environments};
use data::{Dataset, Item};
use distributed::Store;
use grpo_core::LossConfig;
use models::Tokenizer;
use policy::Policy;
use rewards::{Failures, RewardInput, Rewards};
use run_config::{EVAL_PROBLEMS, MAX_SEQUENCES, REWARD, TrainConfig, check};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The phase of a run's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Supervised warm-up, by [`Trainer::warmup_step`].
    Warmup,
    /// GRPO, by [`Trainer::grpo_step`].
    Grpo,
    /// All steps are done.
    Done,
}

/// The number of training problems that decide when the warm-up may end.
const PROBE_PROBLEMS: usize = 128;
/// The number of warm-up steps between two such evaluations.
const PROBE_STEPS: u64 = 5;

/// A run, one step at a time. See the [front page](crate) for an example.
pub struct Trainer {
    config: TrainConfig,
    loss: Arc<LossConfig>,
    parts: Parts,
    rows: Rows,
    updates: Updates,
    coefficients: Coefficients,
    counters: Counters,
    failures: Failures,
    overview: Option<Overview>,
    /// Batches that are sampled in the background.
    ahead: Ahead,
    /// `true` if the engine may have other weights than the policy.
    weights_changed: bool,
    drift: Drift,
}

/// The rows of a run that are fixed at its start.
#[derive(Default)]
pub(crate) struct Rows {
    /// The rows of evaluations; empty if evaluation is off.
    pub(crate) held_out: Vec<Item>,
    /// The training rows that decide when the warm-up may end.
    probe: Vec<Item>,
    /// The number of tokens that environments add to prompts, of the rows that were checked.
    pub(crate) added_by_environments: usize,
}

impl Rows {
    /// Selects the rows from a data set, and checks that the model has room for them (unless `lengths_fit`) and, if this process leads the run,
    /// that every reward function works on one.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Data`] for rows; [`Error::Rewards`] for a failing function.
    pub(crate) fn checked(
        config: &TrainConfig,
        tokenizer: &dyn Tokenizer,
        context: usize,
        dataset: &dyn Dataset,
        rewards: &Rewards,
        lengths_fit: bool,
        leads: bool,
    ) -> Result<Self> {
        check_filter(config, rewards)?;
        PassRule::of(config, rewards)?;
        let held_out = held_out(config, dataset)?;
        let metric = config.run.metric_for_best_model.as_deref();
        let off = "left out: nothing is held out, so evaluation is off (data.held_out_fraction, data.eval_files)";
        let has_evaluations = metric.is_none() || !held_out.is_empty();
        check(has_evaluations, "run.metric_for_best_model", off, metric.unwrap_or_default())?;
        let probe = dataset.probe(PROBE_PROBLEMS)?;
        let target = config.warmup.until_pass_at_1.filter(|_| config.warmup.steps > 0 && probe.is_empty());
        let off = "left out: the data set has no rows that monitor the warm-up (Dataset::probe)";
        check(target.is_none(), "warmup.until_pass_at_1", off, target.unwrap_or_default())?;
        if !lengths_fit {
            let rollout = ("rollout.max_completion_length", config.rollout.max_completion_length());
            check_lengths(rollout, tokenizer, context, held_out.iter().chain(&probe))?;
        }
        if let Some(longest) = config.eval.max_completion_length {
            check_lengths(("eval.max_completion_length", longest), tokenizer, context, held_out.iter())?;
        }
        // Only the leader scores completions.
        if leads {
            probe_rewards(rewards, tokenizer, held_out.first().or(probe.first()))?;
        }
        Ok(Self { held_out, probe, added_by_environments: 0 })
    }

    /// Checks the environments of these rows, and that the model has room for what they add to prompts.
    ///
    /// # Errors
    /// [`Error::Environments`], [`Error::Model`] and [`Error::Config`].
    pub(crate) fn with_environments(
        mut self,
        config: &TrainConfig,
        tokenizer: &dyn Tokenizer,
        context: usize,
        environments: &mut Environments,
        store: Option<&Store>,
    ) -> Result<Self> {
        if environments.is_empty() {
            return Ok(self);
        }
        let parser = config.rollout.multi_turn.tool_parser;
        let rows = self.held_out.iter().chain(&self.probe);
        self.added_by_environments = check_environments(environments, tokenizer, parser, rows, store)?;
        let longest = config.rollout.max_completion_length();
        let found = longest + self.added_by_environments;
        let expected = format!(
            "room for it in the context, {context} tokens, behind {} tokens of tools and environments",
            self.added_by_environments
        );
        check(found < context, "rollout.max_completion_length", &expected, longest)?;
        Ok(self)
    }
}

/// Returns `true` if this process leads the run.
pub(crate) fn leads(store: Option<&Arc<Store>>) -> bool {
    store.is_none_or(|store| store.is_leader())
}

impl Trainer {
    /// Creates a run at step 0 from the parts that the configuration names.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Model`], [`Error::Data`], [`Error::Rewards`] or [`Error::Loss`] for an invalid configuration.
    pub fn new(config: TrainConfig) -> Result<Self> {
        Prepared::new(config)?.trainer()
    }

    /// Creates a run at step 0 from your own parts; [`Parts`] has an example.
    ///
    /// # Errors
    /// The errors of [`Trainer::new`].
    pub fn with_parts(config: TrainConfig, mut parts: Parts) -> Result<Self> {
        let context = parts.policy.context_length();
        let config = config.with_context(context);
        config.validate_for(parts.tokenizer.vocab_size(), context)?;
        let rows = Rows::checked(
            &config,
            &*parts.tokenizer,
            context,
            &*parts.dataset,
            &parts.rewards,
            false,
            leads(parts.store.as_ref()),
        )?
        .with_environments(
            &config,
            &*parts.tokenizer,
            context,
            &mut parts.environments,
            parts.store.as_deref(),
        )?;
        Self::begin(config, parts, rows, None)
    }

    /// Creates a run at step 0 from parts whose rows were checked.
    pub(crate) fn begin(config: TrainConfig, mut parts: Parts, rows: Rows, overview: Option<Overview>) -> Result<Self> {
        check_value_head(&config, &*parts.policy)?;
        if config.grpo.use_kl_in_reward && config.loss.beta != 0.0 {
            tracing::warn!(
                "the KL to the reference is both in the reward (grpo.use_kl_in_reward) and in the loss (loss.beta)"
            );
        }
        warn_of_truncated_sampling(&config);
        if parts.environments.has_agents() && parts.endpoint.is_none() && leads(parts.store.as_ref()) {
            parts.endpoint = Some(Endpoint::open(config.rollout.endpoint.as_deref())?);
        }
        if let Some(endpoint) = &parts.endpoint {
            tracing::info!("agents ask the policy for messages at {}", endpoint.base_url());
        }
        let failures = Failures::new(&parts.rewards, config.rewards.max_consecutive_failures);
        parts.policy.reset_optimizer(&config.warmup.optimizer.adamw)?;
        let mut trainer = Self {
            loss: config.loss().into(),
            parts,
            rows,
            updates: updates(&config, false),
            coefficients: Coefficients::new(&config),
            counters: Counters::default(),
            failures,
            config,
            overview,
            ahead: Ahead::default(),
            weights_changed: true,
            drift: Drift::default(),
        };
        if trainer.config.warmup.steps == 0 {
            trainer.begin_grpo()?;
        }
        Ok(trainer)
    }

    /// Returns the description of the run; `None` for a trainer with custom parts.
    pub fn overview(&self) -> Option<&Overview> {
        self.overview.as_ref()
    }

    /// Returns the configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Returns the policy.
    pub fn policy(&self) -> &dyn Policy {
        &*self.parts.policy
    }

    /// Returns the training and held-out problems.
    pub fn dataset(&self) -> &dyn Dataset {
        &*self.parts.dataset
    }

    /// Returns the reward functions with their weights.
    pub fn rewards(&self) -> &Rewards {
        &self.parts.rewards
    }

    /// Returns the connection to the other processes of the run, if it has several.
    pub fn store(&self) -> Option<&Arc<Store>> {
        self.parts.store.as_ref()
    }

    /// Returns the held-out problems that [`Trainer::evaluate`] uses; empty if evaluation is off.
    pub fn held_out(&self) -> &[Item] {
        &self.rows.held_out
    }

    /// Returns the phase of the next step.
    pub fn phase(&self) -> Phase {
        if !self.counters.warm {
            Phase::Warmup
        } else if self.counters.grpo_steps < self.config.grpo.max_steps {
            Phase::Grpo
        } else {
            Phase::Done
        }
    }

    /// Does one supervised step. The last one is followed by freezing the reference policy and resetting the optimizer.
    ///
    /// # Errors
    /// [`Error::Argument`] if the warm-up is over; the errors of the tokenizer and the policy; [`Error::TooManySkips`]. After an error, the state of the run is as before the step,
    /// except for the data cursor.
    pub fn warmup_step(&mut self) -> Result<WarmupReport> {
        self.expect_phase("warmup_step", Phase::Warmup)?;
        let Parts { policy, tokenizer, dataset, environments, .. } = &mut self.parts;
        let items = dataset.next_batch(self.config.warmup.batch_size)?;
        self.weights_changed = true;
        let mut report = warmup_step(&mut **policy, &**tokenizer, environments, &mut self.updates, &items)?;
        self.counters.warmup_steps += 1;
        report.step = self.counters.warmup_steps;
        if self.counters.warmup_steps >= self.config.warmup.steps || self.reached_target()? {
            self.begin_grpo()?;
        }
        Ok(report)
    }

    /// Does one GRPO step.
    ///
    /// # Errors
    /// [`Error::Argument`] if the phase is not GRPO; the errors of the parts, the advantages and the loss; [`Error::TooFewGroups`] if dynamic
    /// sampling reached its limit; [`rewards::Error::TooManyFailures`] if a reward function failed too often in a row;
    /// [`policy::Error::NotFinite`] if the loss is not finite. After an error, the state of the run is as before the step, except for state
    /// of a custom engine. A device that fails during an update may lose the weights, which the policy reports; the run must then continue
    /// from a checkpoint.
    pub fn grpo_step(&mut self) -> Result<StepReport> {
        self.expect_phase("grpo_step", Phase::Grpo)?;
        let began = Instant::now();
        let has_copied = self.update_engine()?;
        let copied = began.elapsed();
        let (updates, coefficients) = (self.updates.clone(), self.coefficients.clone());
        // Otherwise a failing update changes nothing, and no state has to be saved for a rollback.
        let undo = self.config.grpo.fails_after_an_update();
        let cursor = self.cursor();
        if undo {
            self.parts.policy.begin()?;
        }
        let mut context = StepContext {
            config: &self.config,
            loss: &self.loss,
            parts: &mut self.parts,
            failures: &mut self.failures,
            updates: &mut self.updates,
            coefficients: &mut self.coefficients,
            ahead: &mut self.ahead,
        };
        let done = grpo_step(&mut context, self.counters.grpo_steps);
        // Also after an error, because an update may have been applied before.
        self.weights_changed = true;
        let mut report = match done {
            Ok(report) => report,
            Err(error) => {
                (self.updates, self.coefficients) = (updates, coefficients);
                self.ahead.clear();
                self.parts.dataset.set_cursor(cursor);
                let policy = &mut self.parts.policy;
                let back = if undo { policy.roll_back() } else { policy.skip().map(drop) };
                if let Err(lost) = back {
                    tracing::warn!("the policy cannot go back to before the step that has failed: {lost}");
                }
                return Err(error);
            }
        };
        if undo {
            self.parts.policy.commit();
        }
        self.counters.grpo_steps += 1;
        if self.counters.grpo_steps == 1 {
            let has_tools = self.parts.environments.all_tools().iter().any(Option::is_some);
            warn_of_first_step(&self.config, &self.parts.rewards, has_tools, &report);
        }
        self.counters.num_tokens += report.tokens as u64;
        if has_copied && self.config.rollout.engine.is_server() {
            report.times.add("update_weights", copied);
        }
        self.drift.watch(&report, self.config.rollout.max_staleness);
        Ok(report)
    }

    /// Evaluates the policy on the held-out problems. Does not change the run.
    ///
    /// # Errors
    /// [`Error::Policy`] from the engine; [`Error::Model`] from the tokenizer.
    pub fn evaluate(&mut self) -> Result<EvalReport> {
        self.update_engine()?;
        evaluate(&mut self.parts, &self.rows.held_out, &self.config)
    }

    /// Returns `true` if the warm-up may end before its last step.
    fn reached_target(&mut self) -> Result<bool> {
        let Some(target) = self.config.warmup.until_pass_at_1 else { return Ok(false) };
        if !self.counters.warmup_steps.is_multiple_of(PROBE_STEPS) {
            return Ok(false);
        }
        self.update_engine()?;
        let passed = greedy(&mut self.parts, &self.rows.probe, &self.config, &mut BTreeMap::new())?;
        Ok(passed.iter().filter(|p| **p).count() as f64 >= target * passed.len() as f64)
    }

    /// Gives the policy's weights to the engine if they may have changed. Returns `true` if it did.
    fn update_engine(&mut self) -> Result<bool> {
        let changed = self.weights_changed;
        if changed {
            self.parts.engine.update_weights(&*self.parts.policy, self.counters.grpo_steps)?;
            self.weights_changed = false;
        }
        Ok(changed)
    }

    /// Returns the cursor of the data set before the first row that no step has used.
    fn cursor(&self) -> u64 {
        self.ahead.cursor().unwrap_or_else(|| self.parts.dataset.cursor())
    }

    fn begin_grpo(&mut self) -> Result<()> {
        self.updates = updates(&self.config, true);
        self.parts.policy.reset_optimizer(&self.config.optimizer.adamw)?;
        if self.config.needs_ref_policy() {
            self.parts.policy.freeze_ref_policy()?;
        }
        self.counters.warm = true;
        Ok(())
    }

    fn expect_phase(&self, operation: &'static str, phase: Phase) -> Result<()> {
        if self.phase() == phase {
            return Ok(());
        }
        Err(Error::argument(operation, format!("phase {phase:?}"), format!("phase {:?}", self.phase())))
    }
}

/// Returns the learning rates and skip limits of a phase: of GRPO if the run is `warm`, else of the warm-up.
fn updates(config: &TrainConfig, warm: bool) -> Updates {
    let (of_phase, total_steps) = match warm {
        true => (&config.optimizer, config.grpo.max_steps.saturating_mul(config.grpo.updates() as u64)),
        false => (&config.warmup.optimizer, config.warmup.steps),
    };
    Updates { config: of_phase.clone(), total_steps, skipped_in_a_row: 0 }
}

/// Warns if completions are sampled from another distribution than the softmax of the loss.
fn warn_of_truncated_sampling(config: &TrainConfig) {
    let active = config.rollout.processors().active();
    if active.is_empty() || config.rollout.replay_sampling_mask {
        return;
    }
    let list = |text: &mut dyn Iterator<Item = String>| text.collect::<Vec<_>>().join(", ");
    let found = list(&mut active.iter().map(|(name, value, _)| format!("rollout.{name}={value}")));
    let off = list(&mut active.iter().map(|(name, _, off)| format!("rollout.{name}={off}")));
    tracing::warn!(
        "completions are sampled from a truncated or penalised distribution ({found}), and the loss is over the whole softmax: its \
         probabilities are not those of the samples, which can make a run collapse; rollout.replay_sampling_mask computes the loss of \
         truncated distributions, and {off} switches this off"
    );
}

/// The number of characters of a sample in a warning.
const SHOWN: usize = 300;
/// The share of truncated completions above which the first step is reported.
const MOST_CLIPPED: f64 = 0.9;

/// Warns if little or nothing can be learned from the first step.
fn warn_of_first_step(config: &TrainConfig, rewards: &Rewards, has_tools: bool, report: &StepReport) {
    let clipped = report.metric("completions/clipped_ratio");
    if clipped > MOST_CLIPPED {
        tracing::warn!(
            "{:.0} % of the first step's completions were cut off at rollout.max_completion_length, {}: raise it, or check that the model \
             ends its answers",
            100.0 * clipped,
            config.rollout.max_completion_length()
        );
    }
    if report.metrics.value("reward").is_none() {
        tracing::warn!(
            "no completion of the first step has a reward: no reward function had anything to say about any of them"
        );
    } else if config.grpo.num_generations > 1 && report.metric("frac_reward_zero_std") >= 1.0 {
        tracing::warn!(
            "no group of the first step has completions with different rewards, and there is nothing to learn from such groups: take \
             easier or harder problems, raise grpo.num_generations, or check the reward"
        );
    }
    if has_tools {
        let value = |name: &str| report.metrics.value(name).unwrap_or(0.0);
        let what = if value("tools/call_frequency") == 0.0 {
            Some("no completion of the first step calls a tool")
        } else if value("tools/failure_frequency") >= 1.0 {
            Some("every call of a tool in the first step failed")
        } else {
            None
        };
        if let Some(what) = what {
            let sample: String =
                report.samples.first().map_or("", |sample| &sample.completion).chars().take(SHOWN).collect();
            tracing::warn!(
                sample,
                "{what}: check that the model writes calls in the format of rollout.multi_turn.tool_parser, or warm it up"
            );
        }
    }
    for name in rewards.names().filter(|name| matches_patterns(config, name)) {
        let value = |what: &str| report.metrics.value(&format!("rewards/{name}/{what}")).unwrap_or(0.0);
        if value("mean") == 0.0 && value("std") == 0.0 {
            tracing::warn!(
                "the reward `{name}` matched no completion of the first step: it gave 0, or nothing, to all of them"
            );
        }
    }
}

/// Returns `true` if the reward `name` looks for a pattern, or is a program or an endpoint.
fn matches_patterns(config: &TrainConfig, name: &str) -> bool {
    let of_users = &config.rewards;
    ["think_format", "tag_count", "json"].contains(&name)
        || of_users.regex.contains_key(name)
        || of_users.programs.contains_key(name)
        || of_users.http.contains_key(name)
}

/// Checks that the reward that dynamic sampling filters by exists.
fn check_filter(config: &TrainConfig, rewards: &Rewards) -> Result<()> {
    let filter = &config.grpo.filter_groups;
    let known: Vec<&str> = std::iter::once(REWARD).chain(rewards.names()).collect();
    let is_known = !filter.enable || known.contains(&filter.metric.as_str());
    Ok(check(is_known, "grpo.filter_groups.metric", &format!("one of {}", known.join(", ")), &filter.metric)?)
}

/// Checks that every reward function can score a completion, here the reference answer of a row, so that a program that does not start or
/// an endpoint that does not answer is found before training.
fn probe_rewards(rewards: &Rewards, tokenizer: &dyn Tokenizer, item: Option<&Item>) -> Result<()> {
    let Some(item) = item else { return Ok(()) };
    let completion = item.answer.as_deref().unwrap_or_default();
    // Text that cannot be encoded is reported by the training step.
    let completion_ids = tokenizer.encode_completion(completion).unwrap_or_default();
    Ok(rewards.probe(&RewardInput {
        item,
        completion,
        truncated: false,
        completion_ids: &completion_ids,
        opens_think: false,
        conversation: None,
    })?)
}

/// Returns the held-out problems of an evaluation; empty if the data set holds none out, which turns evaluation off.
fn held_out(config: &TrainConfig, dataset: &dyn Dataset) -> Result<Vec<Item>> {
    let (key, there) = ("eval.num_problems", dataset.num_held_out());
    let off = there == Some(0) && (config.eval.num_problems.is_none() || !config.data.holds_out());
    if off {
        if config.data.holds_out() {
            let share = config.data.held_out_fraction;
            tracing::warn!(
                "no row is held out with data.held_out_fraction {share}, so evaluation is off: raise it, or name data.eval_files"
            );
        }
        return Ok(Vec::new());
    }
    let count = match (config.eval.num_problems, there) {
        (None, there) => there.map_or(EVAL_PROBLEMS, |all| all.min(EVAL_PROBLEMS)),
        (Some(0), None) => {
            check(false, key, "a number above 0: the data set makes problems without end, so there are no `all`", 0)?;
            0
        }
        (Some(0), Some(all)) => all,
        (Some(wanted), there) => {
            let all = there.unwrap_or(usize::MAX);
            let expected = format!(
                "at most {all}, the held-out rows that there are (0 takes all of them), as in `eval: {{ num_problems: {all} }}`; \
                 data.held_out_fraction and data.eval_files hold out more"
            );
            check(wanted <= all, key, &expected, wanted)?;
            wanted
        }
    };
    let of_each = config.eval.num_generations.max(1);
    let larger = if of_each > count { "eval.num_generations" } else { key };
    let expected = format!("at most {MAX_SEQUENCES} sequences in all");
    let few = count.saturating_mul(of_each) <= MAX_SEQUENCES;
    check(few, larger, &expected, format!("{of_each} for each of {count} problems"))?;
    match dataset.held_out(count) {
        // By default, tasks with few problems are evaluated on all of them.
        Err(data::Error::TooFewProblems { found, .. }) if config.eval.num_problems.is_none() && found > 0 => {
            Ok(dataset.held_out(found)?)
        }
        items => Ok(items?),
    }
}

/// Checks that the policy has a value head exactly if values are trained.
fn check_value_head(config: &TrainConfig, policy: &dyn Policy) -> Result<()> {
    match (config.grpo.value_loss().is_some(), policy.has_value_head()) {
        (true, false) => Err(policy::Error::NoValueHead.into()),
        (false, true) => {
            let found = format!("{:?}", config.grpo.advantages.estimator);
            let expected = "gae, because the policy has a value head to train";
            Err(run_config::Error::key("grpo.advantages.estimator", expected, found).into())
        }
        _ => Ok(()),
    }
}

/// Checks that the model's context has room for the prompts of `items` and full completions, before the warm-up.
fn check_lengths<'a>(
    (key, longest): (&str, usize),
    tokenizer: &dyn Tokenizer,
    positions: usize,
    items: impl Iterator<Item = &'a Item>,
) -> Result<()> {
    for item in items {
        let prompt = encode_prompt(tokenizer, &item.prompt)?.len();
        // The last token is never an input.
        check(
            (prompt + longest).saturating_sub(1) <= positions,
            key,
            &format!("room for it in model.max_position_embeddings, {positions}, behind a prompt of {prompt} tokens"),
            longest,
        )?;
    }
    Ok(())
}
