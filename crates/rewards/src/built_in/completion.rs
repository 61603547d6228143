//! Rewards of whole completions: correctness, partial credit, termination and length.

use crate::answer::{AnswerRule, is_right};
use crate::error::Result;
use crate::reward_fn::{RewardFn, RewardInput};
use grpo_core::rewards::SoftOverlong;
use grpo_data::task::character_score;

/// The reward `correct`: 1 for a correct completion that ended by itself, else 0.
///
/// For a row of a task, the task scores the completion. For other rows, the answer is found in the completion and compared with the
/// reference answer by [`crate::math::equivalent`], which also compares words. Without a reference answer, the reward is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Correct {
    /// The rule that finds the answer.
    pub answer: AnswerRule,
}

impl RewardFn for Correct {
    fn name(&self) -> &str {
        "correct"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let right = match &input.item.task {
            Some((task, problem)) => task.verify(problem, input.completion),
            None => is_right(self.answer, input)?,
        };
        Some(f32::from(!input.truncated && right))
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

/// The reward `environment`: the sum of the rewards that the environment of a conversation has given; `None` if it has given none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Environment;

impl RewardFn for Environment {
    fn name(&self) -> &str {
        "environment"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        input.conversation?.reward
    }
}

/// The reward `partial`: the task's partial credit, in [0, 1].
#[derive(Clone, Copy, Debug, Default)]
pub struct Partial;

impl RewardFn for Partial {
    fn name(&self) -> &str {
        "partial"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        match (&input.item.task, &input.item.answer) {
            (Some((task, problem)), _) => Some(task.score(problem, input.completion)),
            (None, Some(_)) => {
                let credit = |answer| character_score(answer, input.completion);
                input.item.answers().map(credit).reduce(f32::max)
            }
            (None, None) => None,
        }
    }

    fn needs_answer(&self) -> bool {
        true
    }
}

/// The reward `terminated`: 1 if the completion ended by itself, else 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terminated;

impl RewardFn for Terminated {
    fn name(&self) -> &str {
        "terminated"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(!input.truncated))
    }
}

/// The reward `soft_overlong_punishment`: a penalty, 0 or below, for completions near the length limit.
#[derive(Clone, Copy, Debug)]
pub struct SoftOverlongPunishment(SoftOverlong);

impl SoftOverlongPunishment {
    /// Returns the penalty with these settings.
    ///
    /// # Errors
    /// The errors of [`SoftOverlong::penalties`].
    pub fn new(settings: SoftOverlong) -> Result<Self> {
        settings.penalties(&[])?;
        Ok(Self(settings))
    }
}

impl RewardFn for SoftOverlongPunishment {
    fn name(&self) -> &str {
        "soft_overlong_punishment"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        // Only invalid settings have no penalties, and `new` rejects them.
        self.0.penalties(&[input.completion_len()]).ok()?.first().copied()
    }
}
