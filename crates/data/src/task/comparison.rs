//! Comparison: `37?48=` -> `<`.

use super::{Problem, Task};
use rand::{Rng, RngExt};
use std::cmp::Ordering;

/// The relation between two integers from 0 to `max_number`: `<`, `>` or `=`.
///
/// ```
/// use data::task::Comparison;
/// use data::{Problem, Task};
///
/// let problem = Problem { prompt: "37?48=".into(), answer: "<".into() };
/// assert!(!Comparison { max_number: 99 }.verify(&problem, ">"));
/// ```
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_accepts_only_the_true_relation() {
        let task = Comparison { max_number: 99 };
        crate::task::testing::check_task(&task);
        let problem = Problem { prompt: "37?48=".into(), answer: "<".into() };
        assert!(!task.verify(&problem, ">"));
        assert_eq!(task.score(&problem, ">"), 0.0);
    }
}
