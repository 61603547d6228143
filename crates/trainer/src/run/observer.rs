//! The events of a run, for whoever shows or logs it.

use super::changes::Change;
use super::checkpoint::CheckpointId;
use super::jsonl::{CompletionRow, MetricsRow, RowKind};
use crate::overview::Overview;
use crate::train_config::TrainConfig;
use std::path::{Path, PathBuf};

/// Something that happened in a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The run begins or goes on.
    Started {
        /// The folder of the run.
        dir: &'a Path,
        /// The configuration of the run.
        config: &'a TrainConfig,
        /// The number of weights of the policy.
        parameters: usize,
        /// Facts about the run; `None` for a trainer with parts of its own.
        overview: Option<&'a Overview>,
        /// The checkpoint that the run goes on from; `None` at the beginning.
        resumed: Option<CheckpointId>,
        /// The keys that have another value than before in the configuration of a run that goes on.
        changes: &'a [Change],
        /// Checkpoints, logs or a summary that were renamed because the run goes on from before them.
        set_aside: &'a [PathBuf],
    },
    /// A phase begins, or goes on after `done` of its `steps`.
    Phase {
        /// The kind of the phase.
        kind: RowKind,
        /// The number of steps done before.
        done: u64,
        /// The number of steps in all; 1 for an evaluation.
        steps: u64,
    },
    /// A row was added to metrics.jsonl.
    Row(&'a MetricsRow),
    /// Rows were added to completions.jsonl.
    Completions(&'a [CompletionRow]),
    /// A checkpoint was saved.
    Saved(&'a Path),
    /// The trained model was written to a folder.
    Exported(&'a Path),
    /// There is a line to show about TensorBoard or Weights & Biases.
    Note(&'a str),
}

/// Receives the events of a run.
///
/// ```
/// use trainer::run::{Event, Observer};
///
/// struct Rewards(Vec<f64>);
/// impl Observer for Rewards {
///     fn event(&mut self, event: Event<'_>) {
///         if let Event::Row(row) = event {
///             self.0.extend(row.get("reward"));
///         }
///     }
/// }
/// ```
pub trait Observer {
    /// Receives the next event, on the thread that trains.
    fn event(&mut self, event: Event<'_>);
}

/// The observer that ignores every event.
impl Observer for () {
    fn event(&mut self, _: Event<'_>) {}
}
