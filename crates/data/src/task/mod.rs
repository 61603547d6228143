//! Verifiable tasks: a prompt, a reference answer, and a verifier that accepts every correct answer.

mod addition;
mod comparison;
mod countdown;
mod reverse;
mod sorting;

pub use addition::Addition;
pub use comparison::Comparison;
pub use countdown::Countdown;
pub use reverse::Reverse;
pub use sorting::Sorting;

use rand::Rng;

/// A problem with its reference answer (others may be correct, too; [`Task::verify`] decides).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The text of the prompt.
    pub prompt: String,
    /// A correct completion, which the supervised warm-up trains on.
    pub answer: String,
}

/// A family of problems with a verifier. Implement it to train on your own task.
///
/// ```
/// use data::{Problem, Task};
/// use rand::{Rng, RngExt};
///
/// /// `double:21=` -> `42`.
/// struct Double;
/// impl Task for Double {
///     fn name(&self) -> &str {
///         "double"
///     }
///     fn sample(&self, rng: &mut dyn Rng) -> Problem {
///         let n: u32 = rng.random_range(0..100);
///         Problem { prompt: format!("double:{n}="), answer: (2 * n).to_string() }
///     }
/// }
/// ```
pub trait Task: Send + Sync {
    /// Returns the name of the task in configurations and metrics.
    fn name(&self) -> &str;

    /// Draws a problem; the same state of `rng` must give the same problem.
    fn sample(&self, rng: &mut dyn Rng) -> Problem;

    /// Returns `true` if `completion` is correct. The default accepts only the reference answer.
    fn verify(&self, problem: &Problem, completion: &str) -> bool {
        completion == problem.answer
    }

    /// Returns partial credit in [0, 1], and 1 for completions that [`Task::verify`] accepts. The default is [`character_score`].
    fn score(&self, problem: &Problem, completion: &str) -> f32 {
        if self.verify(problem, completion) { 1.0 } else { character_score(&problem.answer, completion) }
    }
}

/// Returns the number of characters of `completion` that equal those of `answer` at the same position, divided by the longer length.
pub fn character_score(answer: &str, completion: &str) -> f32 {
    let longest = answer.chars().count().max(completion.chars().count());
    if longest == 0 {
        return 1.0;
    }
    let hits = answer.chars().zip(completion.chars()).filter(|(a, c)| a == c).count();
    hits as f32 / longest as f32
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use models::{CharTokenizer, Tokenizer};
    use rng::{Purpose, stream};

    /// Checks the contract of a task: repeatable problems in the tokenizer's alphabet whose reference answers it accepts.
    pub(crate) fn check_task(task: &dyn Task) {
        for index in 0..200 {
            let draw = || task.sample(&mut stream(7, Purpose::TrainProblem, 0, index));
            let problem = draw();
            assert_eq!(problem, draw());
            assert!(CharTokenizer.encode(&problem.prompt).is_ok(), "{problem:?}");
            assert!(CharTokenizer.encode(&problem.answer).is_ok(), "{problem:?}");
            assert!(task.verify(&problem, &problem.answer), "{problem:?}");
            assert_eq!(task.score(&problem, &problem.answer), 1.0);
            for wrong in ["", "x", &format!("{}0", problem.answer), &format!(" {}", problem.answer)] {
                assert!(!task.verify(&problem, wrong), "{problem:?} accepted {wrong:?}");
                assert!((0.0..1.0).contains(&task.score(&problem, wrong)), "{problem:?} {wrong:?}");
            }
        }
    }

    #[test]
    fn character_score_counts_aligned_characters() {
        assert_eq!(character_score("123", "123"), 1.0);
        assert_eq!(character_score("123", "1x3"), 2.0 / 3.0);
        assert_eq!(character_score("12", "1234"), 0.5);
        assert_eq!(character_score("123", ""), 0.0);
    }
}
