//! Verifiable tasks: a prompt, a reference answer, and a verifier that accepts every correct answer.

mod arithmetic;
mod countdown;
mod sequences;

pub use arithmetic::{Addition, Comparison};
pub use countdown::Countdown;
pub use sequences::{Reverse, Sorting};

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
/// use grpo_data::{Problem, Task};
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

/// Returns the number of characters of `completion` that `answer` has at the same position, divided by the longer length.
pub fn character_score(answer: &str, completion: &str) -> f32 {
    let longest = answer.chars().count().max(completion.chars().count());
    if longest == 0 {
        return 1.0;
    }
    let hits = answer.chars().zip(completion.chars()).filter(|(a, c)| a == c).count();
    hits as f32 / longest as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_models::{CharTokenizer, Tokenizer};
    use grpo_rng::{Purpose, stream};

    /// Returns the first problems of a task.
    fn problems(task: &dyn Task) -> Vec<Problem> {
        (0..200).map(|index| task.sample(&mut stream(7, Purpose::TrainProblem, 0, index))).collect()
    }

    #[test]
    fn problems_repeat_and_only_correct_answers_are_accepted() {
        let tasks: [&dyn Task; 7] = [
            &Addition { max_number: 99, zero_pad: false },
            &Addition { max_number: 50, zero_pad: true },
            &Comparison { max_number: 99 },
            &Sorting { min_length: 2, max_length: 5 },
            &Reverse { min_length: 2, max_length: 5 },
            &Countdown { count: 3, max_number: 9 },
            &Countdown { count: 4, max_number: 25 },
        ];
        for task in tasks {
            assert_eq!(problems(task), problems(task));
            for problem in problems(task) {
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
    }

    #[test]
    fn wrong_answers_get_partial_credit() {
        let (addition, comparison) = (Addition { max_number: 99, zero_pad: false }, Comparison { max_number: 99 });
        let (reverse, sorting) = (Reverse { min_length: 3, max_length: 4 }, Sorting { min_length: 3, max_length: 4 });
        let cases: [(&dyn Task, _, _, _, _); 5] = [
            (&addition, "37+48=", "85", "75", 0.5),
            (&comparison, "37?48=", "<", ">", 0.0),
            (&reverse, "rev:abc=", "cba", "abc", 1.0 / 3.0),
            (&sorting, "sort:3142=", "1234", "3142", 0.0),
            (&sorting, "sort:3142=", "1234", "123", 0.75),
        ];
        for (task, prompt, answer, wrong, score) in cases {
            let problem = Problem { prompt: prompt.into(), answer: answer.into() };
            assert!(!task.verify(&problem, wrong), "{prompt}");
            assert_eq!(task.score(&problem, wrong), score, "{prompt}");
        }
    }

    #[test]
    fn addition_with_zero_padding_has_fixed_widths() {
        for problem in problems(&Addition { max_number: 50, zero_pad: true }) {
            assert_eq!((problem.prompt.len(), problem.answer.len()), (6, 3), "{problem:?}");
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
