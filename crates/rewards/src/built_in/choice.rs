//! The reward for multiple choice.

use crate::answer::{AnswerRule, label, references};
use crate::reward_fn::{RewardFn, RewardInput};

/// The reward `choice`: 1 if the completion chooses the letter of the reference answer, else 0.
///
/// `E`, `(E)`, `E) 12 cm`, `\textbf{(B)}\ 12`, `Option B`, `The correct answer is (C).` and `D is correct` choose a letter. If the
/// reference answer is not a letter, the reward is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
}

impl RewardFn for Choice {
    fn name(&self) -> &str {
        "choice"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let right: Vec<char> = references(input.item)?.iter().filter_map(|answer| label(answer)).collect();
        let chosen = self.answer.letter(input.completion);
        (!right.is_empty()).then(|| f32::from(chosen.is_some_and(|letter| right.contains(&letter))))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}
