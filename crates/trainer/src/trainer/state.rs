//! Exports and restores the state that a run needs to continue.

use super::{Trainer, updates};
use crate::coefficients::{CoefficientState, Coefficients};
use crate::error::Result;
use crate::updates::Updates;
use grpo_models::NamedTensor;
use grpo_policy::{Error, PolicyState, StateGroup, TensorSource, Weights, export_all};
use serde::{Deserialize, Serialize};

/// Counters of a run's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// The number of completed warm-up steps.
    pub warmup_steps: u64,
    /// `true` if the warm-up is over: all its steps are done, or it reached `warmup.until_pass_at_1`.
    pub warm: bool,
    /// The number of completed GRPO steps.
    pub grpo_steps: u64,
    /// The number of optimizer steps in the current phase.
    pub optimizer_steps: u64,
    /// The number of updates skipped since the last applied one, with `skip_grad_norm`.
    pub skipped_in_a_row: u64,
    /// The cursor of the data set: the number of draws from its training stream.
    pub data_cursor: u64,
    /// The number of prompt and completion tokens of all GRPO samples so far.
    pub num_tokens: u64,
}

/// All state that a run needs to continue bit for bit, except its configuration. Random numbers are functions of seed and step, so there
/// is no generator state. Tensors are in memory, or in the files of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainState<T = Vec<NamedTensor>> {
    /// The progress of the run.
    pub counters: Counters,
    /// The weights of the policy.
    pub policy: T,
    /// The moments of the optimizer.
    pub optimizer: T,
    /// The weights of the reference policy; empty if the run has none (yet).
    pub ref_policy: T,
    /// The state of the adaptive coefficients.
    pub coefficients: CoefficientState,
}

impl Trainer {
    /// Returns the progress of the run.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: self.parts.policy.optimizer_steps(),
            skipped_in_a_row: self.updates.skipped_in_a_row,
            data_cursor: self.cursor(),
            ..self.counters
        }
    }

    /// Returns the state of the adaptive coefficients.
    pub fn coefficients(&self) -> CoefficientState {
        self.coefficients.state()
    }

    /// Returns the state to save, in memory.
    ///
    /// # Errors
    /// The errors of [`grpo_policy::Policy::export`].
    pub fn state(&self) -> Result<TrainState> {
        let group = |group| export_all(&*self.parts.policy, group);
        Ok(TrainState {
            counters: self.counters(),
            policy: group(StateGroup::Weights(Weights::Policy))?,
            optimizer: group(StateGroup::Optimizer)?,
            ref_policy: group(StateGroup::Weights(Weights::RefPolicy))?,
            coefficients: self.coefficients.state(),
        })
    }

    /// Replaces the weights of the policy. Optimizer, reference policy and counters stay unchanged.
    ///
    /// # Errors
    /// [`grpo_policy::Error::State`] if the weights belong to another model; the trainer is then unchanged.
    pub fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        self.parts.policy.import_weights(weights)?;
        self.forget_samples();
        Ok(())
    }

    /// Drops completions that other weights have sampled, and lets the engine get the weights before the next ones.
    fn forget_samples(&mut self) {
        self.weights_changed = true;
        if let Some(cursor) = self.ahead.cursor() {
            self.ahead.clear();
            self.parts.dataset.set_cursor(cursor);
        }
    }

    /// Restores the state of a run with the same configuration.
    ///
    /// # Errors
    /// [`grpo_policy::Error::State`] if the state does not match the configuration; the trainer is then unchanged.
    pub fn restore<T: TensorSource>(&mut self, state: &TrainState<T>) -> Result<()> {
        let counters = state.counters;
        for (what, limit, found) in [
            ("counter warmup_steps", self.config.warmup.steps, counters.warmup_steps),
            ("counter grpo_steps", self.config.grpo.max_steps, counters.grpo_steps),
        ] {
            if found > limit {
                return Err(Error::state(what, format!("at most {limit}"), found).into());
            }
        }
        let warm = counters.warm;
        if !warm && counters.grpo_steps > 0 {
            return Err(Error::state("counter grpo_steps", "0 during the warm-up", counters.grpo_steps).into());
        }
        let coefficients = Coefficients::new(&self.config).with_state(&state.coefficients)?;
        let ref_policy: Option<&dyn TensorSource> =
            match (warm && self.config.needs_ref_policy(), state.ref_policy.shapes().is_empty()) {
                (true, false) => Some(&state.ref_policy),
                (false, true) => None,
                // The reference policy of adapters is the base model, which checkpoints do not contain.
                (true, true) if self.config.lora.is_some() => Some(&state.ref_policy),
                (true, true) => {
                    let expected = "its weights, because there is a KL to it";
                    return Err(Error::state("the reference", expected, "none").into());
                }
                (false, false) => {
                    return Err(Error::state("the reference", "none, because there is no KL to it", "weights").into());
                }
            };
        let updates = updates(&self.config, warm);
        self.parts.policy.import(&PolicyState {
            policy: &state.policy,
            ref_policy,
            optimizer: &state.optimizer,
            optimizer_steps: counters.optimizer_steps,
            optimizer_settings: &updates.config.settings,
        })?;
        self.updates = Updates { skipped_in_a_row: counters.skipped_in_a_row, ..updates };
        self.coefficients = coefficients;
        self.forget_samples();
        self.parts.dataset.set_cursor(counters.data_cursor);
        self.counters = counters;
        if counters.grpo_steps > 0 && self.config.rollout.max_staleness > 0 {
            tracing::warn!(
                "the run goes on with completions of its current weights: with rollout.max_staleness {} an uninterrupted run would train on \
                 older ones here, so its numbers are not those of a run that was never stopped",
                self.config.rollout.max_staleness
            );
        }
        Ok(())
    }
}
