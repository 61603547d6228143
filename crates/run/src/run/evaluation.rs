//! The best evaluation of a run and its weights.

use super::Run;
use crate::best::Best;
use crate::checkpoint::CheckpointId;
use crate::error::Result;
use crate::jsonl::MetricsRow;
use crate::processes::{Command, lead};
use crate::shared::SharedTensors;

impl Run {
    /// Returns the best evaluation so far; `None` without `run.metric_for_best_model` and before the first evaluation.
    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref()
    }

    /// Compares an evaluation with the best one so far. Returns `true` if it is better.
    pub(super) fn observe(&mut self, row: &MetricsRow) -> Result<bool> {
        let Some((best, is_better)) = Best::after(self.best.as_ref(), &self.trainer.config().run, row)? else {
            return Ok(false);
        };
        self.best = Some(best);
        Ok(is_better)
    }

    /// Returns `true` if the last `run.early_stopping_patience` evaluations brought no improvement.
    pub(super) fn stops_early(&self) -> bool {
        let patience = self.trainer.config().run.early_stopping_patience;
        let counter = self.best.as_ref().map_or(0, |best| best.early_stopping_patience_counter);
        patience.is_some_and(|patience| counter >= patience)
    }

    /// Returns the checkpoint of the best evaluation.
    pub(super) fn best_checkpoint(&self) -> Option<CheckpointId> {
        self.best.as_ref().map(|best| CheckpointId::Grpo(best.step))
    }

    /// With `run.load_best_model_at_end`, loads the weights of the best checkpoint into the policy.
    pub(super) fn load_best(&mut self) -> Result<()> {
        let Some(best) = self.best_checkpoint().filter(|_| self.trainer.config().run.load_best_model_at_end) else {
            return Ok(());
        };
        if best == self.position {
            return Ok(());
        }
        let (_, state) = self.checkpoints.read(best)?;
        let Some(store) = self.trainer.store().cloned() else { return Ok(self.trainer.load_weights(&state.policy)?) };
        lead(Some(&store), &Command::LoadBest)?;
        Ok(self.trainer.load_weights(&SharedTensors::new(&store, Some(&state.policy))?)?)
    }
}
