//! From a checkpoint back into a trainer.

use super::changes::config_hash;
use super::checkpoint::{Checkpoints, Position, SavedState};
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

/// The checkpoint at `position`, proven, and of a run with this configuration.
pub(super) fn read(
    checkpoints: &Checkpoints,
    position: Position,
    config: &TrainConfig,
) -> Result<(SavedState, TrainState)> {
    let (saved, state) = checkpoints.read(position)?;
    if saved.config_sha256 != config_hash(config)? {
        let reason = "it was taken with another configuration than that of config.yaml and config.recorded.yaml: restore \
                      both, or start a new run";
        return Err(Error::RunDir { path: checkpoints.path(position), reason: reason.to_owned() });
    }
    Ok((saved, state))
}

/// Puts what [`read`] has read into a trainer.
pub(super) fn restore(path: &Path, saved: &SavedState, state: &TrainState, trainer: &mut Trainer) -> Result<()> {
    if saved.threads != rayon::current_num_threads() {
        tracing::warn!(
            "the run used {} threads and goes on with {}: results may differ in the last bits",
            saved.threads,
            rayon::current_num_threads()
        );
    }
    let damaged = |e: Error| Error::Checkpoint { path: path.to_owned(), reason: e.to_string(), last_good: None };
    trainer.restore(state).map_err(damaged)
}
