//! A list of rewards that may have gaps.

use crate::error::{Error, Result};

/// A list of rewards. `None` is the only form of a missing reward: a NaN is an error, as an infinite reward is.
///
/// ```
/// use grpo_core::AdvantageConfig;
///
/// let config = AdvantageConfig::default();
/// assert_eq!(config.advantages(&[1.0, 1.0, 0.5], 3)?.len(), 3);
/// let advantages = config.advantages(&[Some(1.0), None, Some(0.0)], 3)?;
/// assert!(advantages[0] > 0.0 && advantages[1] == 0.0 && advantages[2] < 0.0);
/// assert!(config.advantages(&[1.0, f32::NAN], 2).is_err());
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RewardList<'a> {
    /// Every reward is present.
    Complete(&'a [f32]),
    /// `None` marks a missing reward.
    Partial(&'a [Option<f32>]),
}

impl RewardList<'_> {
    /// Returns the number of rewards, including missing ones.
    pub fn len(&self) -> usize {
        match self {
            Self::Complete(rewards) => rewards.len(),
            Self::Partial(rewards) => rewards.len(),
        }
    }

    /// Returns `true` if there are no rewards, not even missing ones.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn get(&self, index: usize) -> Option<f32> {
        match self {
            Self::Complete(rewards) => Some(rewards[index]),
            Self::Partial(rewards) => rewards[index],
        }
    }

    /// Returns the rewards in f64, where NaN stands for a missing one. Rewards that `is_read` excludes may be anything; they are 0.
    ///
    /// # Errors
    /// [`Error::Value`] for a reward that is not finite, at `position` of its index.
    pub(crate) fn values(
        &self,
        name: &str,
        is_read: impl Fn(usize) -> bool,
        position: impl Fn(usize) -> String,
    ) -> Result<Vec<f64>> {
        let value = |index: usize| match self.get(index) {
            _ if !is_read(index) => Ok(0.0),
            None => Ok(f64::NAN),
            Some(reward) if reward.is_finite() => Ok(f64::from(reward)),
            Some(reward) => {
                Err(Error::value(name, position(index), format!("{reward} is not finite; a missing reward is None")))
            }
        };
        (0..self.len()).map(value).collect()
    }

    /// Returns the rewards of completions, as [`RewardList::values`] does.
    ///
    /// # Errors
    /// The errors of [`RewardList::values`].
    pub(crate) fn of_completions(&self, name: &str) -> Result<Vec<f64>> {
        self.values(name, |_| true, |index| format!("completion {index}"))
    }
}

impl<'a> From<&'a [f32]> for RewardList<'a> {
    fn from(rewards: &'a [f32]) -> Self {
        Self::Complete(rewards)
    }
}

impl<'a> From<&'a Vec<f32>> for RewardList<'a> {
    fn from(rewards: &'a Vec<f32>) -> Self {
        Self::Complete(rewards)
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for RewardList<'a> {
    fn from(rewards: &'a [f32; N]) -> Self {
        Self::Complete(rewards)
    }
}

impl<'a> From<&'a [Option<f32>]> for RewardList<'a> {
    fn from(rewards: &'a [Option<f32>]) -> Self {
        Self::Partial(rewards)
    }
}

impl<'a> From<&'a Vec<Option<f32>>> for RewardList<'a> {
    fn from(rewards: &'a Vec<Option<f32>>) -> Self {
        Self::Partial(rewards)
    }
}

impl<'a, const N: usize> From<&'a [Option<f32>; N]> for RewardList<'a> {
    fn from(rewards: &'a [Option<f32>; N]) -> Self {
        Self::Partial(rewards)
    }
}
