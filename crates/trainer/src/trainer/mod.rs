//! A run, one step at a time: warm-up, then GRPO.

mod rows;
mod state;
mod warnings;

pub use rows::{Rows, rows_to_try};
pub use state::{Counters, TrainState};

use crate::ahead::Ahead;
use crate::coefficients::Coefficients;
use crate::drift::Drift;
use crate::error::{Error, Result};
use crate::eval::{EvalReport, evaluate, greedy};
use crate::overview::Overview;
use crate::parts::Parts;
use crate::step::{StepContext, StepReport, grpo_step};
use crate::updates::Updates;
use crate::warmup::{WarmupReport, warmup_step};
use grpo_conversations::{lockstep::leads, open_endpoint};
use grpo_core::LossConfig;
use grpo_data::{Dataset, Item};
use grpo_distributed::Store;
use grpo_policy::Policy;
use grpo_rewards::{Failures, Rewards};
use grpo_run_config::TrainConfig;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use warnings::{warn_of_first_step, warn_of_long_warmup, warn_of_pass_rule, warn_of_truncated_sampling};

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

/// The number of warm-up steps between two evaluations that decide when it may end.
const PROBE_STEPS: u64 = 5;

/// A run, one step at a time. `grpo_setup::trainer` makes one from a configuration.
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

impl Trainer {
    /// Creates a run at step 0 from parts.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Model`], [`Error::Data`], [`Error::Rewards`] or [`Error::Loss`] for a configuration that is invalid or does
    /// not fit the parts.
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
            leads(parts.store.as_deref()),
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

    /// Creates a run at step 0 from parts whose rows were checked before, with facts about the run.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Policy`] for a policy that does not fit the configuration; [`Error::Environments`] without an endpoint.
    pub fn with_checked_rows(config: TrainConfig, parts: Parts, rows: Rows, overview: Overview) -> Result<Self> {
        Self::begin(config, parts, rows, Some(overview))
    }

    fn begin(config: TrainConfig, mut parts: Parts, rows: Rows, overview: Option<Overview>) -> Result<Self> {
        check_value_head(&config, &*parts.policy)?;
        if config.grpo.use_kl_in_reward && config.loss.beta != 0.0 {
            tracing::warn!(
                "the KL to the reference is both in the reward (grpo.use_kl_in_reward) and in the loss (loss.beta)"
            );
        }
        warn_of_truncated_sampling(&config);
        for (section, warm) in [("warmup.optimizer", false), ("optimizer", true)] {
            let Updates { config, total_steps, .. } = updates(&config, warm);
            warn_of_long_warmup(section, &config, total_steps);
        }
        if parts.environments.has_agents() && parts.endpoint.is_none() && leads(parts.store.as_deref()) {
            parts.endpoint = Some(open_endpoint(&config.rollout)?);
        }
        if let Some(endpoint) = &parts.endpoint {
            tracing::info!("agents ask the policy for messages at {}", endpoint.base_url());
        }
        let failures = Failures::new(&parts.rewards, config.rewards.max_consecutive_failures);
        parts.policy.reset_optimizer(&config.warmup.optimizer.settings)?;
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
    /// sampling reached its limit; [`grpo_rewards::Error::TooManyFailures`] if a reward function failed too often in a row;
    /// [`grpo_policy::Error::NotFinite`] if the loss is not finite. After an error, the state of the run is as before the step, except for state
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
        // Otherwise the loss does not read the sampler's log-probabilities.
        if self.loss.asks_for_sampler_logp() {
            self.drift.watch(&report, self.config.rollout.max_staleness);
        }
        Ok(report)
    }

    /// Evaluates the policy on the held-out problems. Does not change the run.
    ///
    /// # Errors
    /// [`Error::Policy`] from the engine; [`Error::Model`] from the tokenizer.
    pub fn evaluate(&mut self) -> Result<EvalReport> {
        self.update_engine()?;
        let report = evaluate(&mut self.parts, &self.rows.held_out, &self.config)?;
        if self.counters.grpo_steps == 0 {
            warn_of_pass_rule(&self.config, &self.parts.rewards, &report)?;
        }
        Ok(report)
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
        self.parts.policy.reset_optimizer(&self.config.optimizer.settings)?;
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

/// Checks that the policy has a value head exactly if values are trained.
fn check_value_head(config: &TrainConfig, policy: &dyn Policy) -> Result<()> {
    match (config.grpo.value_loss().is_some(), policy.has_value_head()) {
        (true, false) => Err(grpo_policy::Error::NoValueHead.into()),
        (false, true) => {
            let found = format!("{:?}", config.grpo.advantages.estimator);
            let expected = "gae, because the policy has a value head to train";
            Err(grpo_run_config::Error::key("grpo.advantages.estimator", expected, found).into())
        }
        _ => Ok(()),
    }
}
