//! The data set that a training loop takes.

use crate::error::Result;
use crate::task::{Problem, Task};
use std::sync::Arc;

/// A problem, and the task that judges completions of it.
#[derive(Clone)]
pub struct Item {
    /// The problem.
    pub problem: Problem,
    /// The task that the problem came from.
    pub task: Arc<dyn Task>,
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Item({}, {:?})", self.task.name(), self.problem)
    }
}

/// The problems of a run: a stream for training, and fixed lists for evaluation. Implement it to bring your own data.
///
/// What the training stream yields depends on its cursor alone, so that a checkpoint need not hold more.
pub trait Dataset: Send {
    /// The next `count` training problems.
    ///
    /// # Errors
    /// [`crate::Error::TooFewProblems`], or [`crate::Error::Dataset`] from an implementation elsewhere.
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>>;

    /// The first `count` held-out problems, which are never trained on; the same for every call.
    ///
    /// # Errors
    /// As [`Dataset::next_batch`].
    fn held_out(&self, count: usize) -> Result<Vec<Item>>;

    /// `count` problems like those that are trained on, the same for every call: the supervised warm-up is watched with
    /// them. The training stream does not move.
    ///
    /// # Errors
    /// As [`Dataset::next_batch`].
    fn probe(&self, count: usize) -> Result<Vec<Item>>;

    /// The position in the training stream.
    fn cursor(&self) -> u64;

    /// Continues the training stream at `cursor`, which [`Dataset::cursor`] has given before.
    fn set_cursor(&mut self, cursor: u64);
}
