//! Sorting: `sort:3142=` -> `1234`. Reversal: `rev:abc=` -> `cba`.

use super::{Problem, Task};
use rand::{Rng, RngExt};

/// Sorting of `min_length..=max_length` decimal digits, repetitions included.
#[derive(Clone, Debug)]
pub struct Sorting {
    /// The smallest number of digits.
    pub min_length: usize,
    /// The largest number of digits.
    pub max_length: usize,
}

impl Task for Sorting {
    fn name(&self) -> &str {
        "sorting"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let length = rng.random_range(self.min_length..=self.max_length);
        let mut digits: Vec<char> = (0..length).map(|_| char::from(rng.random_range(b'0'..=b'9'))).collect();
        let prompt = format!("sort:{}=", digits.iter().collect::<String>());
        digits.sort_unstable();
        Problem { prompt, answer: digits.into_iter().collect() }
    }
}

/// Reversal of a word of `min_length..=max_length` random lowercase letters.
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
