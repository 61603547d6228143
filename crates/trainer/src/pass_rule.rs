//! The rule by which a completion of an evaluation passes.

use crate::error::Result;
use grpo_rewards::{Correct, RewardFn, Rewards};
use grpo_run_config::{REWARD, TrainConfig};

/// The rule by which a completion of an evaluation passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassRule {
    /// Each of these reward functions of the run returns at least 1.
    Each(Vec<String>),
    /// The weighted sum of all rewards is at least 1.
    Sum,
    /// The built-in `correct`, which is not a reward of the run, returns 1.
    Correct,
}

impl PassRule {
    /// Returns the rule of `eval.pass_reward`. The default is `correct` if it is a reward of the run, otherwise all functions with a positive
    /// weight except length penalties, otherwise the weighted sum.
    ///
    /// # Errors
    /// [`grpo_run_config::Error::Key`] with the valid names.
    pub fn of(config: &TrainConfig, rewards: &Rewards) -> Result<Self> {
        let known = || rewards.names().zip(rewards.weights());
        let correct = Correct::default();
        match config.eval.pass_reward.as_deref() {
            Some(REWARD) => Ok(Self::Sum),
            Some(name) if rewards.names().any(|known| known == name) => Ok(Self::Each(vec![name.to_owned()])),
            Some(name) if name == correct.name() => Ok(Self::Correct),
            Some(name) => {
                let names: Vec<&str> = [REWARD].into_iter().chain(rewards.names()).collect();
                let expected = format!("one of {}, e.g. `eval: {{ pass_reward: {REWARD} }}`", names.join(", "));
                Err(grpo_run_config::Error::key("eval.pass_reward", expected, name).into())
            }
            None if known().any(|(name, weight)| name == correct.name() && weight > 0.0) => {
                Ok(Self::Each(vec![correct.name().to_owned()]))
            }
            None => {
                let penalty = "soft_overlong_punishment";
                let positive = known().filter(|(name, weight)| *weight > 0.0 && *name != penalty);
                let names: Vec<String> = positive.map(|(name, _)| name.to_owned()).collect();
                Ok(if names.is_empty() { Self::Sum } else { Self::Each(names) })
            }
        }
    }
}

/// Completes the sentence "pass@1 counts completions with".
impl std::fmt::Display for PassRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Each(names) => write!(f, "{} at least 1", names.join(" and ")),
            Self::Sum => f.write_str("a reward of at least 1"),
            Self::Correct => f.write_str("correct at least 1, which is no reward of this run"),
        }
    }
}
