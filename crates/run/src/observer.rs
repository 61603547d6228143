//! Events of a run, for display and logging.

use super::changes::Change;
use super::checkpoint::CheckpointId;
use super::jsonl::{CompletionRow, MetricsRow, RowKind};
use grpo_run_config::TrainConfig;
use grpo_trainer::Overview;
use std::path::{Path, PathBuf};

/// An event of a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The run starts or resumes.
    Started {
        /// The folder of the run.
        dir: &'a Path,
        /// The configuration of the run.
        config: &'a TrainConfig,
        /// The number of weights of the policy.
        parameters: usize,
        /// A description of the run; `None` for a trainer with custom parts.
        overview: Option<&'a Overview>,
        /// The checkpoint that the run resumes from; `None` for a new run.
        resumed: Option<CheckpointId>,
        /// The keys whose values changed on resume.
        changes: &'a [Change],
        /// Checkpoints, logs or a summary that were renamed because they are later than the checkpoint.
        set_aside: &'a [PathBuf],
    },
    /// A phase starts, or resumes after `done` of its `steps`.
    Phase {
        /// The kind of the phase.
        kind: RowKind,
        /// The number of steps already done.
        done: u64,
        /// The total number of steps; 1 for an evaluation.
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
    /// A line about TensorBoard or Weights & Biases for the user.
    Note(&'a str),
}

/// Receives the events of a run. Closures implement it, and `()` ignores every event.
///
/// ```
/// use grpo_run::{Event, Observer};
///
/// let mut rewards = Vec::new();
/// let mut observer = |event: Event<'_>| {
///     if let Event::Row(row) = event {
///         rewards.extend(row.get("reward"));
///     }
/// };
/// let observer: &mut dyn Observer = &mut observer; // for `Run::run`
/// # let _ = observer;
/// ```
pub trait Observer {
    /// Receives the next event, on the thread that trains.
    fn event(&mut self, event: Event<'_>);
}

impl<F: FnMut(Event<'_>)> Observer for F {
    fn event(&mut self, event: Event<'_>) {
        self(event);
    }
}

impl Observer for () {
    fn event(&mut self, _: Event<'_>) {}
}
