//! The data set that a training loop takes.

use crate::error::Result;
use crate::files::RowIndex;
use crate::prompt::Prompt;
use crate::task::{Problem, Task};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A row of a data set: what the policy is asked, and what is known of the answer.
///
/// ```
/// use data::Item;
///
/// let item = Item::new("What is 6 x 7?").with_answer("42");
/// assert_eq!(item.answer.as_deref(), Some("42"));
/// ```
#[derive(Clone)]
pub struct Item {
    /// What the policy is asked.
    pub prompt: Prompt,
    /// A right answer, which rewards compare with; `None` where the data has none.
    pub answer: Option<String>,
    /// The right answers beside the first one, where the data has a list: a completion is right with any of them.
    pub other_answers: Vec<String>,
    /// A whole right completion, such as a solution with its steps, which the supervised warm-up trains on; where there is none,
    /// it trains on the answer.
    pub completion: Option<String>,
    /// The other columns of the row, which reward functions are given as they are.
    pub columns: Arc<Map<String, Value>>,
    /// The name of the task or the file that the row came from; metrics are kept per source.
    pub source: Arc<str>,
    /// The task and its problem, which judge completions, where the row came from a task.
    pub task: Option<(Arc<dyn Task>, Problem)>,
}

impl Item {
    /// A row with a prompt and nothing else.
    pub fn new(prompt: impl Into<Prompt>) -> Self {
        Self {
            prompt: prompt.into(),
            answer: None,
            other_answers: Vec::new(),
            completion: None,
            columns: Arc::default(),
            source: "data".into(),
            task: None,
        }
    }

    /// A problem of a task.
    pub fn from_task(task: Arc<dyn Task>, problem: Problem) -> Self {
        Self {
            prompt: problem.prompt.clone().into(),
            answer: Some(problem.answer.clone()),
            other_answers: Vec::new(),
            completion: None,
            columns: Arc::default(),
            source: task.name().into(),
            task: Some((task, problem)),
        }
    }

    /// The row with a right answer.
    #[must_use]
    pub fn with_answer(mut self, answer: impl Into<String>) -> Self {
        self.answer = Some(answer.into());
        self
    }

    /// All right answers, the first one first.
    ///
    /// ```
    /// let item = data::Item { other_answers: vec!["one".into()], ..data::Item::new("0 + 1").with_answer("1") };
    /// assert_eq!(item.answers().collect::<Vec<_>>(), ["1", "one"]);
    /// ```
    pub fn answers(&self) -> impl Iterator<Item = &str> {
        self.answer.iter().chain(&self.other_answers).map(String::as_str)
    }

    /// The text that the supervised warm-up trains on: the completion, or else the answer.
    pub fn warmup_text(&self) -> Option<&str> {
        self.completion.as_deref().or(self.answer.as_deref())
    }
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Item({}, {:?} -> {:?})", self.source, self.prompt.to_string(), self.answer)
    }
}

/// The rows of a run: a stream for training, and fixed lists for evaluation. Implement it to bring your own data.
///
/// What the training stream yields depends on its cursor alone, so that a checkpoint need not hold more.
pub trait Dataset: Send {
    /// The next `count` training rows.
    ///
    /// # Errors
    /// [`crate::Error::TooFewProblems`], or [`crate::Error::Dataset`] from an implementation elsewhere.
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>>;

    /// The first `count` held-out rows, which are never trained on; the same for every call. Where their number is known, as with
    /// files, 0 means all of them.
    ///
    /// # Errors
    /// As [`Dataset::next_batch`], and [`crate::Error::TooFewRows`].
    fn held_out(&self, count: usize) -> Result<Vec<Item>>;

    /// The number of held-out rows, where there is one: tasks make rows without end.
    fn num_held_out(&self) -> Option<usize> {
        None
    }

    /// `count` rows like those that are trained on, the same for every call: the supervised warm-up is watched with
    /// them. The training stream does not move.
    ///
    /// # Errors
    /// As [`Dataset::next_batch`].
    fn probe(&self, count: usize) -> Result<Vec<Item>>;

    /// What was found when files were read, with which [`crate::open`] opens the same files without reading them.
    fn index(&self) -> Option<RowIndex> {
        None
    }

    /// The position in the training stream.
    fn cursor(&self) -> u64;

    /// Continues the training stream at `cursor`, which [`Dataset::cursor`] has given before.
    fn set_cursor(&mut self, cursor: u64);
}
