//! Rewards of a completion as a whole: whether it is right, how nearly, whether it ended by itself, and how long it is.

use crate::answer::{AnswerRule, is_right};
use crate::error::Result;
use crate::reward_fn::{RewardFn, RewardInput};
use data::task::character_score;
use grpo_core::rewards::SoftOverlong;

/// The reward `correct`: 1 for a right completion that ended by itself, else 0.
///
/// A row of a task is judged by the task. For other rows the answer is found in the completion, and has to be equal to the
/// reference answer as [`crate::math::equivalent`] says, which also compares words. Without a reference answer there is
/// nothing to say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Correct {
    /// How the answer is found.
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

/// The reward `terminated`: 1 when the completion ended by itself, else 0.
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

/// The reward `soft_overlong_punishment`: a penalty, 0 or below, for completions that come near the length limit.
#[derive(Clone, Copy, Debug)]
pub struct SoftOverlongPunishment(SoftOverlong);

impl SoftOverlongPunishment {
    /// The penalty with these settings.
    ///
    /// # Errors
    /// Those of [`SoftOverlong::penalties`].
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
        // Only settings that are not legal give no penalties, and those were refused.
        self.0.penalties(&[input.completion_len()]).ok()?.first().copied()
    }
}
