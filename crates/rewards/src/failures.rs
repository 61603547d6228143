//! How often reward functions fail, and when that is too often.

use crate::error::{Error, Result};
use crate::reward_fn::RewardInput;
use crate::weighted::{Reward, Rewards};

/// The number of failures in a row that are logged with their sample; of those that follow only every hundredth is.
const LOGGED: u64 = 3;
/// One failure in so many is logged after that.
const LOGGED_EVERY: u64 = 100;
/// The longest part of a completion in the log, in characters.
const SHOWN: usize = 200;

/// Counts the failures of reward functions in the order of completions.
///
/// ```
/// use rewards::{Failures, RewardConfig, Rewards};
///
/// let rewards = Rewards::new(&RewardConfig { correct: 1.0, ..RewardConfig::default() })?;
/// let mut failures = Failures::new(&rewards, 256);
/// // After each rollout: failures.count(&rewards, &inputs, &scored)?;
/// failures.count(&rewards, &[], &[])?;
/// # Ok::<(), rewards::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Failures {
    most: u64,
    in_a_row: Vec<u64>,
}

impl Failures {
    /// Counters at 0 for the functions of `rewards`, which may fail for less than `max_consecutive_failures` completions in a row.
    pub fn new(rewards: &Rewards, max_consecutive_failures: u64) -> Self {
        Self { most: max_consecutive_failures.max(1), in_a_row: vec![0; rewards.names().count()] }
    }

    /// Counts what [`Rewards::score`] said of `inputs`, and logs failures with their completion (the first in a row, then some).
    ///
    /// # Errors
    /// [`Error::TooManyFailures`] when a function has failed too often in a row. The counters go on from there.
    pub fn count(&mut self, rewards: &Rewards, inputs: &[RewardInput<'_>], scored: &[Reward]) -> Result<()> {
        let names: Vec<&str> = rewards.names().collect();
        for (input, reward) in inputs.iter().zip(scored) {
            for (index, in_a_row) in self.in_a_row.iter_mut().enumerate() {
                let Some((_, failure)) = reward.failures.iter().find(|(failed, _)| *failed == index) else {
                    *in_a_row = 0;
                    continue;
                };
                *in_a_row += 1;
                let name = names.get(index).copied().unwrap_or_default();
                if *in_a_row <= LOGGED || in_a_row.is_multiple_of(LOGGED_EVERY) {
                    let completion: String = input.completion.chars().take(SHOWN).collect();
                    tracing::warn!(
                        prompt = %input.item.prompt,
                        completion,
                        "the reward `{name}` has failed for a completion ({in_a_row} in a row), which is left out: {failure}"
                    );
                }
                if *in_a_row >= self.most {
                    let (failures, last) = (*in_a_row, failure.to_string());
                    return Err(Error::TooManyFailures { name: name.to_owned(), failures, last });
                }
            }
        }
        Ok(())
    }
}
