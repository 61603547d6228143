//! Rewards that compare the values of answers: numbers, mathematics and choices.

use crate::answer::{AnswerRule, is_right, label, parse_number, plain_number, references};
use crate::reward_fn::{RewardFn, RewardInput};

/// The reward `numeric`: 1 if the answer in the completion is the same number as the reference answer, else 0.
///
/// Thousands separators, currencies and units are ignored. The reward is `None` if there is no reference answer or it is not a plain number
/// (`3/4`, `10:30`, `2\sqrt{3}`), and 0 if the answer is not a plain number.
#[derive(Clone, Copy, Debug)]
pub struct Numeric {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
    /// The tolerance: relative to the reference, and absolute for references below 1.
    pub tolerance: f64,
}

impl RewardFn for Numeric {
    fn name(&self) -> &str {
        "numeric"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let references = references(input.item)?;
        let right: Vec<&str> = references.iter().filter_map(|answer| plain_number(answer)).collect();
        let readings = self.answer.readings(input);
        let found = readings.iter().find_map(|reading| plain_number(reading));
        let is_right = |right: &&str| found.is_some_and(|found| numbers_equal(right, found, self.tolerance));
        (!right.is_empty()).then(|| f32::from(right.iter().any(is_right)))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

/// Returns `true` if two texts are the same number up to `tolerance`. A percentage equals both the number before its sign and a hundredth
/// of it, because data sets mean either.
///
/// ```
/// assert!(grpo_rewards::numbers_equal("1234.5", "$1,234.50", 0.0));
/// assert!(grpo_rewards::numbers_equal("0.25", "25%", 1e-9) && grpo_rewards::numbers_equal("25", "25%", 1e-9));
/// ```
pub fn numbers_equal(reference: &str, found: &str, tolerance: f64) -> bool {
    let (Some((a, a_percent)), Some((b, b_percent))) = (parse_number(reference), parse_number(found)) else {
        return false;
    };
    let close = |a: f64, b: f64| (a - b).abs() <= tolerance * a.abs().max(1.0);
    close(a, b) || (a_percent != b_percent && if a_percent { close(a / 100.0, b) } else { close(a, b / 100.0) })
}

/// The reward `math`: 1 if the answer in the completion is mathematically equivalent to the reference answer, by
/// [`crate::math::equivalent`], else 0. Without a reference answer, the reward is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MathEquivalence {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
}

impl RewardFn for MathEquivalence {
    fn name(&self) -> &str {
        "math"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        is_right(self.answer, input).map(f32::from)
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

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
        let chosen = self.answer.letter(input);
        (!right.is_empty()).then(|| f32::from(chosen.is_some_and(|letter| right.contains(&letter))))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}
