//! A run: warm-up, then GRPO, with everything that has to be saved to continue it.

use crate::coefficients::{CoefficientState, Coefficients};
use crate::error::{Error, Result};
use crate::eval::{EvalReport, evaluate, greedy_passes};
use crate::parts::Parts;
use crate::step::{StepContext, StepReport, grpo_step};
use crate::train_config::{REWARD, TrainConfig, check};
use crate::updates::Updates;
use crate::warmup::{WarmupReport, warmup_step};
use data::Item;
use grpo_core::LossConfig;
use models::{NamedTensor, Tokenizer};
use policy::{Policy, PolicyState, StateGroup, export_all};
use rewards::Rewards;
use serde::{Deserialize, Serialize};

/// The part of a run that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Supervised warm-up: [`Trainer::warmup_step`] is next.
    Warmup,
    /// GRPO: [`Trainer::grpo_step`] is next.
    Grpo,
    /// The end: all steps are done.
    Done,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// Warm-up steps done.
    pub warmup_steps: u64,
    /// Whether the warm-up is over: all its steps are done, or it reached `warmup.until_pass_at_1`.
    pub warm: bool,
    /// GRPO steps done.
    pub grpo_steps: u64,
    /// Optimizer steps done in the present phase.
    pub optimizer_steps: u64,
    /// Updates skipped since the last of them, with `skip_grad_norm`.
    pub skipped_in_a_row: u64,
    /// The cursor of the data set: draws made from its training stream.
    pub data_cursor: u64,
    /// Prompt and completion tokens of all GRPO samples so far.
    pub num_tokens: u64,
}

/// Everything that a run needs to continue bit for bit, beside its configuration. Random numbers are functions of
/// seed and step, so there is no state of a generator.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainState {
    /// How far the run has come.
    pub counters: Counters,
    /// The weights of the policy.
    pub policy: Vec<NamedTensor>,
    /// The moments of the optimizer.
    pub optimizer: Vec<NamedTensor>,
    /// The weights of the reference policy; empty when the run has none (yet).
    pub ref_policy: Vec<NamedTensor>,
    /// The coefficients that follow what is measured.
    pub coefficients: CoefficientState,
}

/// Training problems that tell when the warm-up may end, and the steps between looks at them.
const PROBE_PROBLEMS: usize = 128;
const PROBE_STEPS: u64 = 5;

/// A run, one step at a time. See the [front page](crate) for an example.
pub struct Trainer {
    config: TrainConfig,
    loss: LossConfig,
    parts: Parts,
    held_out: Vec<Item>,
    probe: Vec<Item>,
    updates: Updates,
    coefficients: Coefficients,
    counters: Counters,
}

impl Trainer {
    /// A run of the parts that the configuration names, at its beginning.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Model`], [`Error::Data`], [`Error::Rewards`] or [`Error::Loss`] for a configuration that is
    /// not legal.
    pub fn new(config: TrainConfig) -> Result<Self> {
        let parts = Parts::from_config(&config)?;
        Self::with_parts(config, parts)
    }

    /// A run of your own parts, at its beginning; [`Parts`] has an example.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_parts(config: TrainConfig, mut parts: Parts) -> Result<Self> {
        config.validate_for(parts.tokenizer.vocab_size())?;
        check_filter(&config, &parts.rewards)?;
        if config.grpo.use_kl_in_reward && config.loss.beta != 0.0 {
            tracing::warn!(
                "the KL to the reference is both in the reward (grpo.use_kl_in_reward) and in the loss (loss.beta)"
            );
        }
        let held_out = parts.dataset.held_out(config.eval.num_problems)?;
        let probe = parts.dataset.probe(PROBE_PROBLEMS)?;
        check_lengths(&config, &*parts.tokenizer, held_out.iter().chain(&probe))?;
        parts.policy.reset_optimizer(&config.warmup.optimizer.adamw())?;
        let mut trainer = Self {
            loss: config.loss(),
            parts,
            held_out,
            probe,
            updates: warmup_updates(&config),
            coefficients: Coefficients::new(&config),
            counters: Counters::default(),
            config,
        };
        if trainer.config.warmup.steps == 0 {
            trainer.begin_grpo()?;
        }
        Ok(trainer)
    }

    /// The configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The policy.
    pub fn policy(&self) -> &dyn Policy {
        &*self.parts.policy
    }

    /// The held-out problems that [`Trainer::evaluate`] uses.
    pub fn held_out(&self) -> &[Item] {
        &self.held_out
    }

    /// How far the run has come.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: self.parts.policy.optimizer_steps(),
            skipped_in_a_row: self.updates.skipped_in_a_row(),
            data_cursor: self.parts.dataset.cursor(),
            ..self.counters
        }
    }

    /// What comes next.
    pub fn phase(&self) -> Phase {
        if !self.counters.warm {
            Phase::Warmup
        } else if self.counters.grpo_steps < self.config.grpo.max_steps {
            Phase::Grpo
        } else {
            Phase::Done
        }
    }

    /// One supervised step. After the last one the reference policy is frozen and a fresh optimizer takes over.
    ///
    /// # Errors
    /// [`Error::Argument`] when the warm-up is over; otherwise those of [`warmup_step`]. After an error the run's
    /// state is as before the step, except for the data cursor.
    pub fn warmup_step(&mut self) -> Result<WarmupReport> {
        self.expect_phase("warmup_step", Phase::Warmup)?;
        let Parts { policy, tokenizer, dataset, .. } = &mut self.parts;
        let items = dataset.next_batch(self.config.warmup.batch_size)?;
        let mut report = warmup_step(&mut **policy, &**tokenizer, &mut self.updates, &items)?;
        self.counters.warmup_steps += 1;
        report.step = self.counters.warmup_steps;
        if self.counters.warmup_steps >= self.config.warmup.steps || self.reached_target()? {
            self.begin_grpo()?;
        }
        Ok(report)
    }

    /// One GRPO step.
    ///
    /// # Errors
    /// [`Error::Argument`] when the warm-up is not over or the run is; otherwise those of [`grpo_step`]. After an error the
    /// run's state is as before the step; an engine of your own may have moved.
    pub fn grpo_step(&mut self) -> Result<StepReport> {
        self.expect_phase("grpo_step", Phase::Grpo)?;
        let (updates, coefficients) = (self.updates.clone(), self.coefficients.clone());
        let Parts { policy, tokenizer, dataset, rewards, engine } = &mut self.parts;
        let cursor = dataset.cursor();
        policy.begin()?;
        let mut context = StepContext {
            config: &self.config,
            loss: &self.loss,
            tokenizer: &**tokenizer,
            dataset: &mut **dataset,
            rewards,
            engine: &mut **engine,
            updates: &mut self.updates,
            coefficients: &mut self.coefficients,
        };
        let done = grpo_step(&mut **policy, &mut context, self.counters.grpo_steps);
        let report = match done {
            Ok(report) => report,
            Err(error) => {
                (self.updates, self.coefficients) = (updates, coefficients);
                self.parts.dataset.set_cursor(cursor);
                if let Err(lost) = self.parts.policy.roll_back() {
                    tracing::warn!("the policy cannot go back to before the step that has failed: {lost}");
                }
                return Err(error);
            }
        };
        self.parts.policy.commit();
        self.counters.grpo_steps += 1;
        self.counters.num_tokens += report.tokens as u64;
        Ok(report)
    }

    /// Evaluates the present policy on the held-out problems. Does not change the run.
    ///
    /// # Errors
    /// Those of [`evaluate`].
    pub fn evaluate(&mut self) -> Result<EvalReport> {
        evaluate(&mut self.parts, &self.held_out, &self.config)
    }

    /// Everything that has to be saved.
    ///
    /// # Errors
    /// Those of [`Policy::export`].
    pub fn state(&self) -> Result<TrainState> {
        let group = |group| export_all(&*self.parts.policy, group);
        Ok(TrainState {
            counters: self.counters(),
            policy: group(StateGroup::Policy)?,
            optimizer: group(StateGroup::Optimizer)?,
            ref_policy: group(StateGroup::RefPolicy)?,
            coefficients: self.coefficients.state(),
        })
    }

    /// Continues where a run of the same configuration was when it made `state`.
    ///
    /// # Errors
    /// [`policy::Error::State`] when the state does not fit the configuration; the trainer is then unchanged.
    pub fn restore(&mut self, state: &TrainState) -> Result<()> {
        let counters = state.counters;
        for (what, limit, found) in [
            ("counter warmup_steps", self.config.warmup.steps, counters.warmup_steps),
            ("counter grpo_steps", self.config.grpo.max_steps, counters.grpo_steps),
        ] {
            if found > limit {
                return Err(Error::state(what, format!("at most {limit}"), found));
            }
        }
        let warm = counters.warm;
        if !warm && counters.grpo_steps > 0 {
            return Err(Error::state("counter grpo_steps", "0 during the warm-up", counters.grpo_steps));
        }
        let coefficients = Coefficients::new(&self.config).with_state(&state.coefficients)?;
        let ref_policy = match (warm && self.config.needs_ref_policy(), state.ref_policy.is_empty()) {
            (true, false) => Some(&state.ref_policy[..]),
            (false, true) => None,
            (true, true) => {
                return Err(Error::state("the reference", "its weights, because there is a KL to it", "none"));
            }
            (false, false) => {
                return Err(Error::state("the reference", "none, because there is no KL to it", "weights"));
            }
        };
        let updates = if warm { grpo_updates(&self.config) } else { warmup_updates(&self.config) };
        self.parts.policy.import(&PolicyState {
            policy: &state.policy,
            ref_policy,
            optimizer: &state.optimizer,
            optimizer_steps: counters.optimizer_steps,
            adamw: &updates.config().adamw(),
        })?;
        self.updates = updates.with_skipped_in_a_row(counters.skipped_in_a_row);
        self.coefficients = coefficients;
        self.parts.dataset.set_cursor(counters.data_cursor);
        self.counters = counters;
        Ok(())
    }

    /// Whether the warm-up may end before its last step.
    fn reached_target(&mut self) -> Result<bool> {
        let Some(target) = self.config.warmup.until_pass_at_1 else { return Ok(false) };
        if !self.counters.warmup_steps.is_multiple_of(PROBE_STEPS) {
            return Ok(false);
        }
        let passed = greedy_passes(&mut self.parts, &self.probe, &self.config)?;
        Ok(passed.iter().filter(|p| **p).count() as f64 >= target * passed.len() as f64)
    }

    fn begin_grpo(&mut self) -> Result<()> {
        self.updates = grpo_updates(&self.config);
        self.parts.policy.reset_optimizer(&self.config.optimizer.adamw())?;
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

fn warmup_updates(config: &TrainConfig) -> Updates {
    Updates::new(&config.warmup.optimizer, config.warmup.steps)
}

fn grpo_updates(config: &TrainConfig) -> Updates {
    Updates::new(&config.optimizer, config.grpo.max_steps.saturating_mul(config.grpo.updates() as u64))
}

/// Whether dynamic sampling looks at something that is there.
fn check_filter(config: &TrainConfig, rewards: &Rewards) -> Result<()> {
    let filter = &config.grpo.filter_groups;
    let known: Vec<&str> = std::iter::once(REWARD).chain(rewards.names()).collect();
    check(
        !filter.enable || known.contains(&filter.metric.as_str()),
        "grpo.filter_groups.metric",
        &format!("one of {}", known.join(", ")),
        &filter.metric,
    )
}

/// Whether the model has room for the prompts of `items` and for completions of full length: it should be said before
/// the warm-up, not after it.
fn check_lengths<'a>(
    config: &TrainConfig,
    tokenizer: &dyn Tokenizer,
    items: impl Iterator<Item = &'a Item>,
) -> Result<()> {
    let positions = config.model.max_position_embeddings;
    for item in items {
        let prompt = tokenizer.encode_prompt(&item.problem.prompt)?.len();
        // The last token is never fed back.
        check(
            (prompt + config.rollout.max_completion_length).saturating_sub(1) <= positions,
            "rollout.max_completion_length",
            &format!("room for it in model.max_position_embeddings, {positions}, behind a prompt of {prompt} tokens"),
            config.rollout.max_completion_length,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
