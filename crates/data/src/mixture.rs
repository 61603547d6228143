//! A weighted mixture of tasks as an endless stream of training problems and a fixed held-out set.
//!
//! Problem number `i` is a pure function of (seed, i), so the only state is a cursor. A prompt is held out depending on a hash of its text,
//! independent of task, stream and seed, so training never sees a held-out prompt.

use crate::config::{DataConfig, HELD_OUT_FRACTION, TasksConfig};
use crate::dataset::{Dataset, Item};
use crate::error::{Error, Result, check};
use crate::prompt::{is_held_out, prompt_hash};
use crate::task::{Addition, Comparison, Countdown, Reverse, Sorting, Task};
use grpo_rng::{Purpose, stream};
use rand::RngExt;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Tasks with their relative frequencies.
pub type WeightedTasks = Vec<(Arc<dyn Task>, f64)>;

/// An endless stream of problems drawn from tasks.
///
/// ```
/// use grpo_data::task::Reverse;
/// use grpo_data::{Dataset, TaskMixture};
/// use std::sync::Arc;
///
/// # fn main() -> grpo_data::Result<()> {
/// let task = Arc::new(Reverse { min_length: 2, max_length: 8 });
/// let mut words = TaskMixture::from_tasks(vec![(task, 1.0)], 0.1, 0)?;
/// assert_eq!(words.next_batch(64)?.len(), 64);
/// # Ok(())
/// # }
/// ```
pub struct TaskMixture {
    tasks: WeightedTasks,
    held_out_fraction: f64,
    seed: u64,
    cursor: u64,
}

/// The number of draws per requested problem after which a split counts as too small.
const ATTEMPTS_PER_PROBLEM: u64 = 1000;

impl TaskMixture {
    /// Creates a mixture of the built-in tasks with the weights of a configuration.
    ///
    /// # Errors
    /// The errors of [`TaskMixture::from_tasks`].
    pub fn new(config: &DataConfig, seed: u64) -> Result<Self> {
        Self::from_tasks(built_in(&config.tasks), config.held_out_fraction, seed)
    }

    /// Creates a mixture of tasks with relative frequencies; tasks of weight 0 are left out. `held_out_fraction` is the share of all prompts
    /// that is held out.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is negative or not finite, if all are 0, or if the fraction is not in [0, 1).
    pub fn from_tasks(mut tasks: WeightedTasks, held_out_fraction: f64, seed: u64) -> Result<Self> {
        for (task, weight) in &tasks {
            let key = format!("data.tasks.{}.weight", task.name());
            check(weight.is_finite() && *weight >= 0.0, &key, "a finite number >= 0", weight)?;
        }
        tasks.retain(|(_, weight)| *weight > 0.0);
        check(!tasks.is_empty(), "data.tasks", "at least one task with a weight above 0", "none")?;
        let is_share = (0.0..1.0).contains(&held_out_fraction);
        check(is_share, "data.held_out_fraction", HELD_OUT_FRACTION, held_out_fraction)?;
        Ok(Self { tasks, held_out_fraction, seed, cursor: 0 })
    }

    /// Returns `true` if a prompt belongs to the held-out split.
    pub fn is_held_out(&self, prompt: &str) -> bool {
        is_held_out(prompt_hash(prompt), self.held_out_fraction)
    }

    /// Returns `count` problems whose prompts are in a split, from draw number `first` on, and the number of the draw after them.
    fn items(
        &self,
        (purpose, split): (Purpose, &'static str),
        first: u64,
        count: usize,
        mut is_in_split: impl FnMut(&str) -> bool,
    ) -> Result<(Vec<Item>, u64)> {
        let mut items = Vec::with_capacity(count);
        let mut cursor = first;
        while items.len() < count {
            let attempts = cursor - first;
            if attempts >= ATTEMPTS_PER_PROBLEM * count as u64 {
                return Err(Error::TooFewProblems { split, wanted: count, found: items.len(), attempts });
            }
            let item = self.draw(purpose, cursor);
            cursor += 1;
            if is_in_split(&item.prompt.to_string()) {
                items.push(item);
            }
        }
        Ok((items, cursor))
    }

    fn training_items(&self, purpose: Purpose, first: u64, count: usize) -> Result<(Vec<Item>, u64)> {
        self.items((purpose, "training"), first, count, |prompt| !self.is_held_out(prompt))
    }

    fn draw(&self, purpose: Purpose, index: u64) -> Item {
        let mut rng = stream(self.seed, purpose, 0, index);
        let total: f64 = self.tasks.iter().map(|(_, weight)| weight).sum();
        let mut point = rng.random::<f64>() * total;
        let mut chosen = &self.tasks[self.tasks.len() - 1].0;
        for (task, weight) in &self.tasks {
            if point < *weight {
                chosen = task;
                break;
            }
            point -= weight;
        }
        Item::from_task(Arc::clone(chosen), chosen.sample(&mut rng))
    }
}

impl Dataset for TaskMixture {
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>> {
        let (items, cursor) = self.training_items(Purpose::TrainProblem, self.cursor, count)?;
        self.cursor = cursor;
        Ok(items)
    }

    fn held_out(&self, count: usize) -> Result<Vec<Item>> {
        let mut seen = BTreeSet::new();
        let is_new = |prompt: &str| self.is_held_out(prompt) && seen.insert(prompt.to_owned());
        self.items((Purpose::EvalProblem, "held-out"), 0, count, is_new).map(|(items, _)| items)
    }

    /// Returns 0 if nothing is held out, and `None` otherwise, because problems are generated without end.
    fn num_held_out(&self) -> Option<usize> {
        (self.held_out_fraction == 0.0).then_some(0)
    }

    fn probe(&self, count: usize) -> Result<Vec<Item>> {
        self.training_items(Purpose::Probe, 0, count).map(|(items, _)| items)
    }

    /// Returns the number of draws made from the training stream so far.
    fn cursor(&self) -> u64 {
        self.cursor
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.cursor = cursor;
    }
}

fn built_in(config: &TasksConfig) -> WeightedTasks {
    let TasksConfig { addition, comparison, sorting, reverse, countdown } = config;
    vec![
        (Arc::new(Addition { max_number: addition.max_number, zero_pad: addition.zero_pad }), addition.weight),
        (Arc::new(Comparison { max_number: comparison.max_number }), comparison.weight),
        (Arc::new(Sorting { min_length: sorting.min_length, max_length: sorting.max_length }), sorting.weight),
        (Arc::new(Reverse { min_length: reverse.min_length, max_length: reverse.max_length }), reverse.weight),
        (Arc::new(Countdown { count: countdown.count, max_number: countdown.max_number }), countdown.weight),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed() -> DataConfig {
        let mut config = DataConfig::default();
        config.tasks.addition.weight = 1.0;
        config.tasks.comparison.weight = 1.0;
        config.tasks.sorting.weight = 2.0;
        config
    }

    #[test]
    fn training_and_held_out_problems_are_disjoint() {
        let mut data = TaskMixture::new(&mixed(), 3).unwrap();
        let held_out: BTreeSet<_> = data.held_out(200).unwrap().into_iter().map(|i| i.prompt.to_string()).collect();
        assert_eq!(held_out.len(), 200, "held-out problems are distinct");
        let train = data.next_batch(20_000).unwrap();
        assert!(train.iter().all(|i| !held_out.contains(&i.prompt.to_string())));
        // About a tenth of the draws are skipped.
        let share = 1.0 - 20_000.0 / data.cursor() as f64;
        assert!((share - 0.1).abs() < 0.02, "held-out share {share}");
        // The training stream of another seed does not contain them either.
        let other = TaskMixture::new(&mixed(), 4).unwrap().next_batch(20_000).unwrap();
        assert!(other.iter().all(|i| !held_out.contains(&i.prompt.to_string())));
    }

    #[test]
    fn mixtures_continue_from_their_cursor() {
        let mut data = TaskMixture::new(&mixed(), 3).unwrap();
        data.next_batch(17).unwrap();
        let mut resumed = TaskMixture::new(&mixed(), 3).unwrap();
        resumed.set_cursor(data.cursor());
        let prompts = |items: Vec<Item>| items.into_iter().map(|i| i.prompt).collect::<Vec<_>>();
        assert_eq!(prompts(data.next_batch(50).unwrap()), prompts(resumed.next_batch(50).unwrap()));
    }

    #[test]
    fn task_weights_are_frequencies_and_zero_disables_a_task() {
        let mut data = TaskMixture::new(&mixed(), 0).unwrap();
        let items = data.next_batch(8000).unwrap();
        let share = |name: &str| items.iter().filter(|i| *i.source == *name).count() as f64 / 8000.0;
        assert!((share("sorting") - 0.5).abs() < 0.03);
        assert!((share("addition") - 0.25).abs() < 0.03);
        assert_eq!(share("reverse"), 0.0);
    }

    #[test]
    fn small_or_empty_mixtures_are_errors() {
        let mut config = DataConfig::default();
        assert!(matches!(TaskMixture::new(&config, 0), Err(Error::Config { .. })));
        config.tasks.comparison.weight = 1.0;
        config.tasks.comparison.max_number = 3;
        let data = TaskMixture::new(&config, 0).unwrap();
        assert!(matches!(data.held_out(100), Err(Error::TooFewProblems { split: "held-out", .. })));
    }
}
