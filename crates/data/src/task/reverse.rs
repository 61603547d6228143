//! Reversal: `rev:abc=` -> `cba`.

use super::{Problem, Task};
use rand::{Rng, RngExt};

/// Reversal of a word of `min_length..=max_length` random lowercase letters.
///
/// ```
/// use data::task::Reverse;
/// use data::{Problem, Task};
///
/// let problem = Problem { prompt: "rev:abc=".into(), answer: "cba".into() };
/// assert_eq!(Reverse { min_length: 3, max_length: 4 }.score(&problem, "cxa"), 2.0 / 3.0);
/// ```
#[derive(Clone, Debug)]
pub struct Reverse {
    /// The smallest number of letters.
    pub min_length: usize,
    /// The largest number of letters.
    pub max_length: usize,
}

impl Task for Reverse {
    fn name(&self) -> &str {
        "reverse"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let length = rng.random_range(self.min_length..=self.max_length);
        let word: String = (0..length).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect();
        Problem { prompt: format!("rev:{word}="), answer: word.chars().rev().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_accepts_only_the_reversed_word() {
        let task = Reverse { min_length: 2, max_length: 5 };
        crate::task::testing::check_task(&task);
        let problem = Problem { prompt: "rev:abc=".into(), answer: "cba".into() };
        assert!(!task.verify(&problem, "abc"));
        assert_eq!(task.score(&problem, "abc"), 1.0 / 3.0);
    }
}
