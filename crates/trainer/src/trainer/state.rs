//! What a run needs to continue, out of the trainer and back into it.

use super::{Trainer, grpo_updates, warmup_updates};
use crate::coefficients::{CoefficientState, Coefficients};
use crate::error::{Error, Result};
use models::NamedTensor;
use policy::{PolicyState, StateGroup, TensorSource, Weights, export_all};
use serde::{Deserialize, Serialize};

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// The number of warm-up steps done.
    pub warmup_steps: u64,
    /// Whether the warm-up is over: all its steps are done, or it reached `warmup.until_pass_at_1`.
    pub warm: bool,
    /// The number of GRPO steps done.
    pub grpo_steps: u64,
    /// The number of optimizer steps done in the present phase.
    pub optimizer_steps: u64,
    /// The number of updates skipped since the last of them, with `skip_grad_norm`.
    pub skipped_in_a_row: u64,
    /// The cursor of the data set: draws made from its training stream.
    pub data_cursor: u64,
    /// The number of prompt and completion tokens of all GRPO samples so far.
    pub num_tokens: u64,
}

/// Everything that a run needs to continue bit for bit, beside its configuration. Random numbers are functions of
/// seed and step, so there is no state of a generator. Its tensors are in memory, or in the files of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainState<T = Vec<NamedTensor>> {
    /// How far the run has come.
    pub counters: Counters,
    /// The weights of the policy.
    pub policy: T,
    /// The moments of the optimizer.
    pub optimizer: T,
    /// The weights of the reference policy; empty when the run has none (yet).
    pub ref_policy: T,
    /// The coefficients that follow what is measured.
    pub coefficients: CoefficientState,
}

#[cfg(test)]
impl<T: TensorSource> TrainState<T> {
    /// The same state with all of its tensors in memory, to be compared.
    pub(crate) fn in_memory(&self) -> Result<TrainState> {
        let read = |source: &T| -> Result<Vec<NamedTensor>> {
            let tensors = source.shapes().into_iter().map(|(name, shape)| {
                let data = source.values(name)?.into_owned();
                Ok(NamedTensor { name: name.to_owned(), shape: shape.to_vec(), data })
            });
            tensors.collect()
        };
        Ok(TrainState {
            counters: self.counters,
            policy: read(&self.policy)?,
            optimizer: read(&self.optimizer)?,
            ref_policy: read(&self.ref_policy)?,
            coefficients: self.coefficients.clone(),
        })
    }
}

impl Trainer {
    /// How far the run has come.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: self.parts.policy.optimizer_steps(),
            skipped_in_a_row: self.updates.skipped_in_a_row(),
            data_cursor: self.parts.dataset.cursor(),
            ..self.counters
        }
    }

    /// The coefficients that follow what is measured.
    pub fn coefficients(&self) -> CoefficientState {
        self.coefficients.state()
    }

    /// Everything that has to be saved to continue the run, in memory.
    ///
    /// # Errors
    /// Those of [`policy::Policy::export`].
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

    /// Takes other weights for the policy. Optimizer, reference policy and counters stay what they are.
    ///
    /// # Errors
    /// [`policy::Error::State`] when they are of another model; the trainer is then unchanged.
    pub fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        Ok(self.parts.policy.import_weights(weights)?)
    }

    /// Continues where a run of the same configuration was when it made `state`.
    ///
    /// # Errors
    /// [`policy::Error::State`] when the state does not fit the configuration; the trainer is then unchanged.
    pub fn restore<T: TensorSource>(&mut self, state: &TrainState<T>) -> Result<()> {
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
        let ref_policy: Option<&dyn TensorSource> =
            match (warm && self.config.needs_ref_policy(), state.ref_policy.shapes().is_empty()) {
                (true, false) => Some(&state.ref_policy),
                (false, true) => None,
                // The reference of adapters is the model without them, of which no checkpoint holds anything.
                (true, true) if self.config.lora.is_some() => Some(&state.ref_policy),
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
}
