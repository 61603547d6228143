//! Rewards that compare text.

use crate::answer::{AnswerRule, references};
use crate::error::Result;
use crate::reward_fn::{RewardFn, RewardInput, one};
use grpo_files::KeyError;
use serde::{Deserialize, Serialize};

/// The reward `exact`: 1 if the answer in the completion equals the reference answer, ignoring leading and trailing white space, else 0.
/// Without a reference answer, the reward is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
}

impl RewardFn for Exact {
    fn name(&self) -> &str {
        "exact"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let references = references(input.item)?;
        let answer = self.answer.find(input);
        Some(f32::from(answer.is_some_and(|answer| references.iter().any(|right| answer.trim() == right.trim()))))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

/// The reward `normalized`: like [`Exact`], after [`normalize_text`] of both.
#[derive(Clone, Copy, Debug, Default)]
pub struct Normalized {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
}

impl RewardFn for Normalized {
    fn name(&self) -> &str {
        "normalized"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let references = references(input.item)?;
        let answer = self.answer.find(input).map(|answer| normalize_text(&answer));
        Some(f32::from(answer.is_some_and(|answer| references.iter().any(|right| answer == normalize_text(right)))))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

/// Returns the text in lower case, without ASCII punctuation and the articles a, an and the, and with white space collapsed to one space:
/// the normalisation of SQuAD's evaluation script (arXiv 1606.05250).
///
/// ```
/// assert_eq!(grpo_rewards::normalize_text("  The  U.S. Senate!"), "us senate");
/// ```
pub fn normalize_text(text: &str) -> String {
    let letters: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let words = letters.split_whitespace().filter(|word| !["a", "an", "the"].contains(word));
    words.collect::<Vec<_>>().join(" ")
}

/// The settings of a reward for a regular expression.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexConfig {
    /// The regular expression, in the syntax of the crate `regex`; it may match anywhere, unless anchored by `^` or `$`.
    pub pattern: String,
    /// The weight of the reward.
    #[serde(default = "one")]
    pub weight: f32,
}

/// A reward for a regular expression: 1 if it matches the completion, else 0.
#[derive(Clone, Debug)]
pub struct Regex {
    name: String,
    regex: regex::Regex,
}

impl Regex {
    /// Returns the reward called `name` for `pattern`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an invalid regular expression.
    pub fn new(name: impl Into<String>, pattern: &str) -> Result<Self> {
        let name = name.into();
        let regex = regex::Regex::new(pattern).map_err(|error| {
            // The library's message has several lines with a drawing of the position. Only the last line, which has the reason, is used.
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            KeyError {
                key: format!("rewards.regex.{name}.pattern"),
                expected: "a regular expression".into(),
                found: format!("`{pattern}`: {reason}"),
            }
        })?;
        Ok(Self { name, regex })
    }
}

impl RewardFn for Regex {
    fn name(&self) -> &str {
        &self.name
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(self.regex.is_match(input.completion)))
    }
}
