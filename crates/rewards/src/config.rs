//! The section `rewards` of a run's configuration.

use crate::built_in::{Correct, Partial, SoftOverlongPunishment, Terminated};
use crate::error::{Result, check};
use crate::reward_fn::RewardFn;
use grpo_core::rewards::SoftOverlong;
use serde::{Deserialize, Serialize};

/// The weights of the built-in rewards; a weight of 0 leaves the reward out. The reward is the weighted sum.
///
/// ```
/// let config = rewards::RewardConfig { correct: 1.0, partial: 0.25, ..Default::default() };
/// let rewards = rewards::Rewards::new(&config)?;
/// assert_eq!(rewards.names().collect::<Vec<_>>(), ["correct", "partial"]);
/// # Ok::<(), rewards::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardConfig {
    /// The weight of [`crate::Correct`]: 1 when the task verifies the completion, else 0.
    pub correct: f32,
    /// The weight of [`crate::Partial`]: partial credit in [0, 1], per character unless the task defines its own.
    pub partial: f32,
    /// The weight of [`crate::Terminated`]: 1 when the completion ended by itself (EOS) within the length limit, else 0.
    pub terminated: f32,
    /// The penalty for completions that come near the length limit, in tokens with EOS (DAPO). Its weight is its own
    /// `penalty_factor`; `None` is off.
    pub soft_overlong_punishment: Option<SoftOverlong>,
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self { correct: 1.0, partial: 0.0, terminated: 0.0, soft_overlong_punishment: None }
    }
}

impl RewardConfig {
    /// Checks every field. Whether a reward is left at all, [`crate::Rewards::new`] says.
    ///
    /// # Errors
    /// [`crate::Error::Config`] that names the key; [`crate::Error::Overlong`] for the penalty.
    pub fn validate(&self) -> Result<()> {
        self.terms().map(drop)
    }

    /// The rewards whose weight is not 0, with their weights: the one list of what is built in. A reward is called as its key.
    pub(crate) fn terms(&self) -> Result<Vec<(Box<dyn RewardFn>, f32)>> {
        let mut terms: Vec<(Box<dyn RewardFn>, f32)> = vec![
            (Box::new(Correct), self.correct),
            (Box::new(Partial), self.partial),
            (Box::new(Terminated), self.terminated),
        ];
        if let Some(overlong) = self.soft_overlong_punishment {
            terms.push((Box::new(SoftOverlongPunishment::new(overlong)?), 1.0));
        }
        for (term, weight) in &terms {
            check(weight.is_finite(), &format!("rewards.{}", term.name()), "a finite number", weight)?;
        }
        terms.retain(|(_, weight)| *weight != 0.0);
        Ok(terms)
    }
}
