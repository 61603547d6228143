//! Rewards from JSON configurations, and completions to score.

use grpo_data::Item;
use grpo_rewards::{Reward, RewardConfig, RewardInput, Rewards};
use serde_json::Value;

pub(crate) fn config(keys: Value) -> RewardConfig {
    serde_json::from_value(keys).unwrap()
}

pub(crate) fn rewards(keys: Value) -> Rewards {
    Rewards::new(&config(keys)).unwrap()
}

/// Returns the error of an invalid configuration.
pub(crate) fn refused(keys: Value) -> String {
    Rewards::new(&config(keys)).map(drop).unwrap_err().to_string()
}

/// Scores completions of one row. A completion of n letters has n + 1 tokens.
pub(crate) fn score(rewards: &Rewards, item: &Item, completions: &[&str]) -> Vec<Reward> {
    let ids = vec![0; completions.iter().map(|completion| completion.len() + 1).max().unwrap_or_default()];
    let inputs = completions.iter().map(|completion| RewardInput {
        completion_ids: &ids[..=completion.len()],
        ..RewardInput::new(item, completion)
    });
    rewards.score(&inputs.collect::<Vec<_>>())
}

/// Returns the total reward of one completion.
pub(crate) fn total(keys: Value, answer: &str, completion: &str) -> Option<f32> {
    score(&rewards(keys), &Item::new("?").with_answer(answer), &[completion])[0].total
}

/// Returns the total of each completion, or the message of its failure.
#[cfg(unix)]
pub(crate) fn outcomes(rewards: &Rewards, completions: &[&str]) -> Vec<Result<Option<f32>, String>> {
    let outcome = |reward: Reward| match reward.failures.first() {
        None => Ok(reward.total),
        Some((index, failure)) => {
            assert_eq!((*index, reward.total), (0, None));
            Err(failure.to_string())
        }
    };
    score(rewards, &Item::new("6 x 7?").with_answer("42"), completions).into_iter().map(outcome).collect()
}

/// Returns the message of the failure to score a completion.
#[cfg(unix)]
pub(crate) fn failure(rewards: &Rewards) -> String {
    outcomes(rewards, &["a"])[0].clone().unwrap_err()
}
