//! Addition: `37+48=` -> `85`, or `37+08=` -> `045` with leading zeros.

use super::{Problem, Task};
use rand::{Rng, RngExt};

/// Addition of two integers, uniform from 0 to `max_number`.
///
/// ```
/// use data::Task;
/// use data::task::Addition;
///
/// let problem = Addition { max_number: 99, zero_pad: true }.sample(&mut rng::stream(0, rng::Purpose::TrainProblem, 0, 0));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addition_accepts_only_the_sum() {
        let task = Addition { max_number: 99, zero_pad: false };
        crate::task::testing::check_task(&task);
        let problem = Problem { prompt: "37+48=".into(), answer: "85".into() };
        assert!(!task.verify(&problem, "75"));
        assert_eq!(task.score(&problem, "75"), 0.5);
    }
    #[test]
    fn addition_with_zero_padding_has_fixed_widths() {
        let task = Addition { max_number: 50, zero_pad: true };
        crate::task::testing::check_task(&task);
        for index in 0..200 {
            let mut rng = rng::stream(1, rng::Purpose::TrainProblem, 0, index);
            let problem = task.sample(&mut rng);
            assert_eq!((problem.prompt.len(), problem.answer.len()), (6, 3), "{problem:?}");
        }
    }
}
