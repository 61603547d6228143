//! Rewards from JSON configurations, and completions to score.

use data::Item;
use rewards::{Reward, RewardConfig, RewardInput, Rewards};
use serde_json::Value;

/// Returns the configuration without `correct` and with these keys.
pub(crate) fn config(keys: Value) -> RewardConfig {
    let mut all = serde_json::json!({"correct": 0.0});
    all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

pub(crate) fn rewards(keys: Value) -> Rewards {
    Rewards::new(&config(keys)).unwrap()
}

/// Returns the error of an invalid configuration.
pub(crate) fn refused(keys: Value) -> String {
    Rewards::new(&config(keys)).map(drop).unwrap_err().to_string()
}

/// Scores completions of one row.
pub(crate) fn score(rewards: &Rewards, item: &Item, completions: &[&str]) -> Vec<Reward> {
    let ids = vec![0; completions.iter().map(|completion| completion.len() + 1).max().unwrap_or_default()];
    let inputs: Vec<_> = completions
        .iter()
        .map(|completion| RewardInput {
            item,
            completion,
            truncated: false,
            completion_ids: &ids[..=completion.len()],
            opens_think: false,
        })
        .collect();
    rewards.score(&inputs)
}

/// Returns the total reward of one completion.
pub(crate) fn total(keys: Value, answer: &str, completion: &str) -> Option<f32> {
    score(&rewards(keys), &Item::new("?").with_answer(answer), &[completion])[0].total
}
