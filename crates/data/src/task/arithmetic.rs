//! Addition: `37+48=` -> `85`, or `37+08=` -> `045` with leading zeros. Comparison: `37?48=` -> `<`.

use super::{Problem, Task};
use rand::{Rng, RngExt};
use std::cmp::Ordering;

/// Addition of two integers, uniform from 0 to `max_number`.
///
/// ```
/// use grpo_data::Task;
/// use grpo_data::task::Addition;
///
/// let problem = Addition { max_number: 99, zero_pad: true }.sample(&mut grpo_rng::stream(0, grpo_rng::Purpose::TrainProblem, 0, 0));
/// assert_eq!((problem.prompt.len(), problem.answer.len()), (6, 3));
/// ```
#[derive(Clone, Debug)]
pub struct Addition {
    /// The largest summand.
    pub max_number: u32,
    /// `true` if numbers are zero-padded to the width of the largest. Place values then have fixed positions, which is much easier to learn.
    pub zero_pad: bool,
}

impl Task for Addition {
    fn name(&self) -> &str {
        "addition"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let a = rng.random_range(0..=self.max_number);
        let b = rng.random_range(0..=self.max_number);
        let sum = u64::from(a) + u64::from(b);
        let digits = |largest: u64| if self.zero_pad { largest.to_string().len() } else { 0 };
        let (width, sum_width) = (digits(self.max_number.into()), digits(2 * u64::from(self.max_number)));
        Problem { prompt: format!("{a:0width$}+{b:0width$}="), answer: format!("{sum:0sum_width$}") }
    }
}

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
