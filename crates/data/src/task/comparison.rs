//! Comparison: `37?48=` -> `<`.

use super::{Problem, Task};
use rand::{Rng, RngExt};
use std::cmp::Ordering;

/// The relation between two integers from 0 to `max_number`: `<`, `>` or `=`.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The largest number.
    pub max_number: u32,
}

impl Task for Comparison {
    fn name(&self) -> &str {
        "comparison"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let a = rng.random_range(0..=self.max_number);
        // With uniform draws, equal numbers would be too rare to learn.
        let b = if rng.random_bool(0.1) { a } else { rng.random_range(0..=self.max_number) };
        let answer = match a.cmp(&b) {
            Ordering::Less => "<",
            Ordering::Equal => "=",
            Ordering::Greater => ">",
        };
        Problem { prompt: format!("{a}?{b}="), answer: answer.into() }
    }
}
