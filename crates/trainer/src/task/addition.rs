//! `37+48=` -> `85`.

use super::{Problem, Task};
use rand::{Rng, RngExt};

/// Addition of two integers drawn evenly from 0 to `max_number`.
#[derive(Clone, Debug)]
pub struct Addition {
    /// Largest summand.
    pub max_number: u32,
}

impl Task for Addition {
    fn name(&self) -> &str {
        "addition"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let a = rng.random_range(0..=self.max_number);
        let b = rng.random_range(0..=self.max_number);
        Problem { prompt: format!("{a}+{b}="), answer: (u64::from(a) + u64::from(b)).to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_the_sum() {
        let task = Addition { max_number: 99 };
        crate::task::testing::check_task(&task);
        let problem = Problem { prompt: "37+48=".into(), answer: "85".into() };
        assert!(!task.verify(&problem, "75"));
        assert_eq!(task.score(&problem, "75"), 0.5);
    }
}
