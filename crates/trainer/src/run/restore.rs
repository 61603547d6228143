//! From a checkpoint back into a trainer.

use super::checkpoint::{Checkpoints, Position, SavedState, sha256};
use crate::error::{Error, Result};
use crate::train_config::TrainConfig;
use crate::trainer::{TrainState, Trainer};
use std::path::Path;

/// The checkpoint to continue from; `None` when there is none at all.
pub(super) fn choose(checkpoints: &Checkpoints, from: Option<&str>, run: &Path) -> Result<Option<Position>> {
    let positions = checkpoints.list()?;
    let Some(name) = from else { return Ok(positions.last().copied()) };
    match positions.iter().find(|p| p.to_string() == name) {
        Some(position) => Ok(Some(*position)),
        None => {
            let names: Vec<_> = positions.iter().map(Position::to_string).collect();
            let there =
                if names.is_empty() { "it has none".to_owned() } else { format!("it has {}", names.join(", ")) };
            Err(Error::RunDir { path: run.to_owned(), reason: format!("there is no checkpoint `{name}`; {there}") })
        }
    }
}

pub(super) fn restore(checkpoints: &Checkpoints, position: Position, trainer: &mut Trainer) -> Result<SavedState> {
    let (saved, state): (SavedState, TrainState) = checkpoints.read(position)?;
    let path = checkpoints.path(position);
    if saved.config_sha256 != config_hash(trainer.config())? {
        let reason =
            "config.yaml has changed since the checkpoint was taken, so it would not be the same run; restore \
                      it, or start a new run"
                .to_owned();
        return Err(Error::RunDir { path, reason });
    }
    if saved.threads != rayon::current_num_threads() {
        tracing::warn!(
            "the run used {} threads and goes on with {}: results may differ in the last bits",
            saved.threads,
            rayon::current_num_threads()
        );
    }
    trainer.restore(&state).map_err(|e| Error::Checkpoint { path, reason: e.to_string(), last_good: None })?;
    Ok(saved)
}

/// Hash of all that the numbers of a run depend on.
pub(super) fn config_hash(config: &TrainConfig) -> Result<String> {
    let (run, logging, wandb) = Default::default();
    let mut numbers = TrainConfig { run, logging, wandb, ..config.clone() };
    // Says where a run gives up, not what it does until then.
    numbers.grpo.filter_groups.max_num_gen_batches = 1;
    serde_json::to_vec(&numbers).map(|bytes| sha256(&bytes)).map_err(|e| Error::Text(format!("configuration: {e}")))
}
