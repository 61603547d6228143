//! A run: warm-up, then GRPO, with everything that has to be saved to continue it.

use crate::backends;
use crate::coefficients::{CoefficientState, Coefficients};
use crate::dataset::{Dataset, Item};
use crate::error::{Error, Result};
use crate::eval::{EvalReport, evaluate, greedy_passes};
use crate::loss::PolicyLoss;
use crate::model::{Decoder, NamedTensor};
use crate::optim::AdamW;
use crate::reward::Rewards;
use crate::rollout::{BatchedEngine, RolloutEngine};
use crate::step::{StepContext, StepReport, grpo_step};
use crate::tokenizer::Tokenizer;
use crate::train_config::{REWARD, TrainConfig, check};
use crate::warmup::{WarmupReport, warmup_step};
use burn::module::Module;
use burn::tensor::Device;
use grpo_core::Backend;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What comes next in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// [`Trainer::warmup_step`].
    Warmup,
    /// [`Trainer::grpo_step`].
    Grpo,
    /// Nothing.
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
    /// Draws made from the training stream.
    pub data_cursor: u64,
    /// Prompt and completion tokens of all GRPO samples so far.
    pub num_tokens: u64,
}

/// Everything that a run needs to continue bit for bit, beside its configuration. Random numbers are functions of
/// seed and step, so there is no generator state.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainState {
    /// Counters.
    pub counters: Counters,
    /// Weights of the policy.
    pub policy: Vec<NamedTensor>,
    /// Moments of the optimizer.
    pub optimizer: Vec<NamedTensor>,
    /// Weights of the reference; empty when the run has none (yet).
    pub reference: Vec<NamedTensor>,
    /// Coefficients that follow what is measured.
    pub coefficients: CoefficientState,
}

/// Training problems that tell when the warm-up may end, and the steps between looks at them.
const PROBE_PROBLEMS: usize = 128;
const PROBE_STEPS: u64 = 5;

/// A run.
pub struct Trainer {
    config: TrainConfig,
    dataset: Dataset,
    held_out: Vec<Item>,
    probe: Vec<Item>,
    rewards: Rewards,
    engine: Box<dyn RolloutEngine>,
    loss: PolicyLoss,
    policy: Decoder,
    reference: Option<Decoder>,
    optimizer: AdamW,
    coefficients: Coefficients,
    counters: Counters,
}

impl Trainer {
    /// A run of the built-in tasks, rewards and engine, at its beginning.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Loss`], [`Error::TooFewProblems`].
    pub fn new(config: TrainConfig) -> Result<Self> {
        config.validate()?;
        let dataset = Dataset::new(&config.data, config.seed)?;
        let rewards = Rewards::new(&config.rewards)?;
        let engine = Box::new(BatchedEngine { batch_size: config.rollout.batch_size });
        Self::with_parts(config, dataset, rewards, engine)
    }

    /// A run with your own tasks, rewards or engine in place of those that the configuration names.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_parts(
        config: TrainConfig,
        dataset: Dataset,
        rewards: Rewards,
        engine: Box<dyn RolloutEngine>,
    ) -> Result<Self> {
        config.validate()?;
        check_filter(&config, &rewards)?;
        if config.grpo.use_kl_in_reward && config.loss.beta != 0.0 {
            tracing::warn!(
                "the KL to the reference is both in the reward (grpo.use_kl_in_reward) and in the loss (loss.beta)"
            );
        }
        let loss = PolicyLoss {
            config: config.loss(),
            backend: backends::open(&config.grpo.backend, config.grpo.plugin.as_deref())?,
            implementation: config.grpo.implementation,
            max_tokens: config.grpo.micro_batch_sequences() * config.rollout.max_completion_length,
        };
        let (held_out, probe) = (dataset.held_out(config.eval.num_problems)?, dataset.probe(PROBE_PROBLEMS)?);
        check_lengths(&config, held_out.iter().chain(&probe))?;
        let policy = Decoder::new(&config.model, config.seed, &Device::flex().autodiff())?;
        let mut trainer = Self {
            held_out,
            probe,
            optimizer: AdamW::new(&config.warmup.optimizer, config.warmup.steps),
            dataset,
            rewards,
            engine,
            loss,
            policy,
            reference: None,
            coefficients: Coefficients::new(&config),
            counters: Counters::default(),
            config,
        };
        if trainer.config.warmup.steps == 0 {
            trainer.begin_grpo();
        }
        Ok(trainer)
    }

    /// Hands the loss to another backend. The numbers stay the same within the backend's tolerance.
    #[must_use]
    pub fn with_backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.loss.backend = backend;
        self
    }

    /// The configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The policy, on a device with autodiff.
    pub fn policy(&self) -> &Decoder {
        &self.policy
    }

    /// The held-out problems that [`Trainer::evaluate`] uses.
    pub fn held_out(&self) -> &[Item] {
        &self.held_out
    }

    /// How far the run has come.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: self.optimizer.steps(),
            skipped_in_a_row: self.optimizer.skipped_in_a_row(),
            data_cursor: self.dataset.cursor(),
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

    /// One supervised step. After the last one the reference is frozen and a fresh optimizer takes over.
    ///
    /// # Errors
    /// [`Error::Argument`] when the warm-up is over; otherwise those of [`warmup_step`]. After an error the run's
    /// state is as before the step, except for the data cursor.
    pub fn warmup_step(&mut self) -> Result<WarmupReport> {
        self.expect_phase("warmup_step", Phase::Warmup)?;
        let items = self.dataset.next_batch(self.config.warmup.batch_size)?;
        let (policy, mut report) = warmup_step(self.policy.clone(), &mut self.optimizer, &items)?;
        self.policy = policy;
        self.counters.warmup_steps += 1;
        report.step = self.counters.warmup_steps;
        if self.counters.warmup_steps >= self.config.warmup.steps || self.reached_target()? {
            self.begin_grpo();
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
        let (optimizer, reference) = (self.optimizer.clone(), self.reference.clone());
        let (coefficients, cursor) = (self.coefficients.clone(), self.dataset.cursor());
        let mut context = StepContext {
            config: &self.config,
            loss: &self.loss,
            dataset: &mut self.dataset,
            rewards: &self.rewards,
            engine: self.engine.as_mut(),
            reference: &mut self.reference,
            coefficients: &mut self.coefficients,
        };
        let step = self.counters.grpo_steps;
        let done = grpo_step(self.policy.clone(), &mut self.optimizer, &mut context, step);
        let (policy, report) = done.inspect_err(|_| {
            (self.optimizer, self.reference, self.coefficients) = (optimizer, reference, coefficients);
            self.dataset.set_cursor(cursor);
        })?;
        self.policy = policy;
        self.counters.grpo_steps += 1;
        self.counters.num_tokens += report.tokens as u64;
        Ok(report)
    }

    /// Evaluates the present policy on the held-out problems. Does not change the run.
    ///
    /// # Errors
    /// Those of [`evaluate`].
    pub fn evaluate(&mut self) -> Result<EvalReport> {
        evaluate(&self.policy.valid(), self.engine.as_mut(), &self.held_out, &self.rewards, &self.config)
    }

    /// Everything that has to be saved.
    pub fn state(&self) -> TrainState {
        TrainState {
            counters: self.counters(),
            policy: self.policy.parameters(),
            optimizer: self.optimizer.state(),
            reference: self.reference.as_ref().map(Decoder::parameters).unwrap_or_default(),
            coefficients: self.coefficients.state(),
        }
    }

    /// Continues where a run of the same configuration was when it made `state`.
    ///
    /// # Errors
    /// [`Error::State`] when the state does not fit the configuration; the trainer is then unchanged.
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
        let policy = self.policy.clone().with_parameters(&state.policy)?;
        let optimizer = if warm { self.grpo_optimizer() } else { self.warmup_optimizer() };
        let mut optimizer = optimizer.with_skipped_in_a_row(counters.skipped_in_a_row);
        // In the order of the model's own walk: a saved state may list its tensors in any order.
        optimizer.restore(counters.optimizer_steps, &state.optimizer, &policy.parameters())?;
        let coefficients = Coefficients::new(&self.config).with_state(&state.coefficients)?;
        let reference = match (warm && self.config.needs_reference(), state.reference.is_empty()) {
            (true, false) => Some(self.policy.valid().with_parameters(&state.reference)?),
            (false, true) => None,
            (true, true) => {
                return Err(Error::state("the reference", "its weights, because there is a KL to it", "none"));
            }
            (false, false) => {
                return Err(Error::state("the reference", "none, because there is no KL to it", "weights"));
            }
        };
        self.policy = policy;
        self.optimizer = optimizer;
        self.reference = reference;
        self.coefficients = coefficients;
        self.dataset.set_cursor(counters.data_cursor);
        self.counters = counters;
        Ok(())
    }

    fn warmup_optimizer(&self) -> AdamW {
        AdamW::new(&self.config.warmup.optimizer, self.config.warmup.steps)
    }

    fn grpo_optimizer(&self) -> AdamW {
        let grpo = &self.config.grpo;
        AdamW::new(&self.config.optimizer, grpo.max_steps.saturating_mul(grpo.updates() as u64))
    }

    /// Whether the warm-up may end before its last step.
    fn reached_target(&mut self) -> Result<bool> {
        let Some(target) = self.config.warmup.until_pass_at_1 else { return Ok(false) };
        if !self.counters.warmup_steps.is_multiple_of(PROBE_STEPS) {
            return Ok(false);
        }
        let passed = greedy_passes(&self.policy.valid(), self.engine.as_mut(), &self.probe, &self.config)?;
        Ok(passed.iter().filter(|p| **p).count() as f64 >= target * passed.len() as f64)
    }

    fn begin_grpo(&mut self) {
        self.counters.warm = true;
        self.optimizer = self.grpo_optimizer();
        self.reference = self.config.needs_reference().then(|| self.policy.valid());
    }

    fn expect_phase(&self, operation: &'static str, phase: Phase) -> Result<()> {
        if self.phase() == phase {
            return Ok(());
        }
        Err(Error::argument(operation, format!("phase {phase:?}"), format!("phase {:?}", self.phase())))
    }
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
fn check_lengths<'a>(config: &TrainConfig, items: impl Iterator<Item = &'a Item>) -> Result<()> {
    let positions = config.model.max_position_embeddings;
    for item in items {
        let prompt = Tokenizer.encode_prompt(&item.problem.prompt)?.len();
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
