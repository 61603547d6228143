//! Counts the failures of reward functions, and ends a run with too many.

use crate::error::{Error, Result};
use crate::reward_fn::RewardInput;
use crate::weighted::{Reward, Rewards};

/// The number of consecutive failures that are logged with their completion.
const LOGGED: u64 = 3;
/// The interval of failures that are logged afterwards.
const LOGGED_EVERY: u64 = 100;
/// The maximum length of a completion in the log, in characters.
const SHOWN: usize = 200;

/// Counts the consecutive failures of each reward function.
///
/// ```
/// use grpo_rewards::{Failures, RewardConfig, Rewards};
///
/// let rewards = Rewards::new(&RewardConfig { correct: 1.0, ..RewardConfig::default() })?;
/// let mut failures = Failures::new(&rewards, 256);
/// // After each rollout: failures.count(&rewards, &inputs, &scored)?;
/// failures.count(&rewards, &[], &[])?;
/// # Ok::<(), grpo_rewards::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Failures {
    most: u64,
    in_a_row: Vec<u64>,
}

impl Failures {
    /// Returns counters at 0 for the functions of `rewards`; `max_consecutive_failures` consecutive failures are an error.
    pub fn new(rewards: &Rewards, max_consecutive_failures: u64) -> Self {
        Self { most: max_consecutive_failures.max(1), in_a_row: vec![0; rewards.names().count()] }
    }

    /// Counts the results of [`Rewards::score`] for `inputs`, and logs the first consecutive failures with their completions, then some.
    ///
    /// # Errors
    /// [`Error::TooManyFailures`] for a function with too many consecutive failures. The counters are kept.
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

    /// Checks the rewards of the first step, without those of failed conversations: a function that failed to score all of them would fail
    /// in every step.
    ///
    /// # Errors
    /// [`Error::FailedFirstStep`] for the first such function.
    pub fn check_first_step(rewards: &Rewards, scored: &[&Reward]) -> Result<()> {
        for (index, name) in rewards.names().enumerate() {
            let failure = |reward: &&Reward| reward.failures.iter().rfind(|(failed, _)| *failed == index).cloned();
            let failed: Option<Vec<_>> = scored.iter().map(failure).collect();
            if let Some((_, last)) = failed.as_ref().and_then(|failed| failed.last()) {
                let (name, last) = (name.to_owned(), last.to_string());
                return Err(Error::FailedFirstStep { name, failures: scored.len(), last });
            }
        }
        Ok(())
    }
}
