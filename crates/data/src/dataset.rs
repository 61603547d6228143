//! The rows of a data set, and the trait of data sets.

use crate::error::Result;
use crate::files::RowIndex;
use crate::prompt::Prompt;
use crate::task::{Problem, Task};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A row of a data set: a prompt with its reference answer.
///
/// ```
/// use grpo_data::Item;
///
/// let item = Item::new("What is 6 x 7?").with_answer("42");
/// assert_eq!(item.answer.as_deref(), Some("42"));
/// ```
#[derive(Clone)]
pub struct Item {
    /// The prompt.
    pub prompt: Prompt,
    /// The reference answer, which rewards compare with; `None` if the data has none.
    pub answer: Option<String>,
    /// Alternative reference answers, if the data has a list; each of them makes a completion correct.
    pub other_answers: Vec<String>,
    /// A whole reference completion, such as a solution with its steps, for the supervised warm-up, which otherwise trains on the answer.
    pub completion: Option<String>,
    /// The other columns of the row, passed to reward functions unchanged.
    pub columns: Arc<Map<String, Value>>,
    /// The name of the row's task or file, by which metrics are grouped.
    pub source: Arc<str>,
    /// The task and its problem, which score completions, if the row came from a task.
    pub task: Option<(Arc<dyn Task>, Problem)>,
}

impl Item {
    /// Returns a row with only a prompt.
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

    /// Returns a problem of a task as a row.
    pub fn from_task(task: Arc<dyn Task>, problem: Problem) -> Self {
        let item = Self::new(problem.prompt.as_str()).with_answer(problem.answer.as_str());
        Self { source: task.name().into(), task: Some((task, problem)), ..item }
    }

    /// Returns the row with a reference answer.
    #[must_use]
    pub fn with_answer(mut self, answer: impl Into<String>) -> Self {
        self.answer = Some(answer.into());
        self
    }

    /// Returns all reference answers, starting with `answer`.
    ///
    /// ```
    /// let item = grpo_data::Item { other_answers: vec!["one".into()], ..grpo_data::Item::new("0 + 1").with_answer("1") };
    /// assert_eq!(item.answers().collect::<Vec<_>>(), ["1", "one"]);
    /// ```
    pub fn answers(&self) -> impl Iterator<Item = &str> {
        self.answer.iter().chain(&self.other_answers).map(String::as_str)
    }

    /// Returns the text that the supervised warm-up trains on: the completion, or else the answer.
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
/// The training stream is a function of its cursor, which is therefore its whole state in checkpoints. The default implementations are those
/// of a data set without held-out rows, for runs without evaluation.
///
/// ```
/// use grpo_data::{Dataset, Item, Result};
///
/// /// Prompts in turn.
/// struct Prompts(Vec<String>, u64);
/// impl Dataset for Prompts {
///     fn next_batch(&mut self, count: usize) -> Result<Vec<Item>> {
///         let first = self.1 as usize % self.0.len();
///         self.1 += count as u64;
///         Ok(self.0.iter().cycle().skip(first).take(count).map(|prompt| Item::new(prompt.as_str())).collect())
///     }
///     fn cursor(&self) -> u64 {
///         self.1
///     }
///     fn set_cursor(&mut self, cursor: u64) {
///         self.1 = cursor;
///     }
/// }
/// let mut prompts = Prompts(vec!["1".into(), "2".into()], 0);
/// assert_eq!(prompts.next_batch(3)?.len(), 3);
/// assert_eq!(prompts.num_held_out(), Some(0));
/// # Ok::<(), grpo_data::Error>(())
/// ```
pub trait Dataset: Send {
    /// Returns the next `count` training rows.
    ///
    /// # Errors
    /// [`crate::Error::TooFewProblems`]; [`crate::Error::Dataset`] from other implementations.
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>>;

    /// Returns the first `count` held-out rows, which are never trained on. Repeated calls return the same rows. If their number is
    /// finite, as for files, 0 means all of them.
    ///
    /// # Errors
    /// The errors of [`Dataset::next_batch`]; [`crate::Error::TooFewRows`].
    fn held_out(&self, count: usize) -> Result<Vec<Item>> {
        let _ = count;
        Ok(Vec::new())
    }

    /// Returns the number of held-out rows, if it is finite; tasks generate rows without end. 0 turns evaluation off.
    fn num_held_out(&self) -> Option<usize> {
        Some(0)
    }

    /// Returns `count` rows similar to training rows, by which the supervised warm-up is monitored; none if the data set does not support
    /// that. Repeated calls return the same rows and do not advance the training stream.
    ///
    /// # Errors
    /// The errors of [`Dataset::next_batch`].
    fn probe(&self, count: usize) -> Result<Vec<Item>> {
        let _ = count;
        Ok(Vec::new())
    }

    /// Returns the index that was built while files were read. [`crate::open`] can open the same files with it without reading them.
    fn index(&self) -> Option<RowIndex> {
        None
    }

    /// Returns the position in the training stream.
    fn cursor(&self) -> u64;

    /// Moves the training stream to `cursor`, an earlier result of [`Dataset::cursor`].
    fn set_cursor(&mut self, cursor: u64);
}
