//! What a run tells while it runs.

use super::changes::Change;
use super::checkpoint::CheckpointId;
use super::jsonl::{CompletionRow, MetricsRow, RowKind};
use crate::train_config::TrainConfig;
use std::path::{Path, PathBuf};

/// Something that happened in a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The run begins or goes on here.
    Started {
        /// Its folder.
        dir: &'a Path,
        /// Its configuration.
        config: &'a TrainConfig,
        /// Number of weights of the policy.
        parameters: usize,
        /// The checkpoint it goes on from; `None` at the beginning.
        resumed: Option<CheckpointId>,
        /// What has another value than before in the configuration of a run that goes on.
        changes: &'a [Change],
        /// Checkpoints, logs or a summary that were renamed because the run goes on from before them.
        set_aside: &'a [PathBuf],
    },
    /// A phase begins, or goes on after `done` of its `steps`.
    Phase {
        /// Which one.
        kind: RowKind,
        /// Steps done before.
        done: u64,
        /// Steps in all; 1 for an evaluation.
        steps: u64,
    },
    /// A row was added to metrics.jsonl.
    Row(&'a MetricsRow),
    /// Rows were added to completions.jsonl.
    Completions(&'a [CompletionRow]),
    /// A checkpoint was saved.
    Saved(&'a Path),
    /// A line about TensorBoard or Weights & Biases.
    Note(&'a str),
}

/// Is told what happens in a run.
pub trait Observer {
    /// Called in the order of events, on the thread that trains.
    fn event(&mut self, event: Event<'_>);
}

/// Hears nothing.
impl Observer for () {
    fn event(&mut self, _: Event<'_>) {}
}
