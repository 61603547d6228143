//! The reward for valid JSON.

use crate::reward_fn::{RewardFn, RewardInput};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The settings of the reward `json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JsonConfig {
    /// The weight of the reward.
    pub weight: f32,
    /// Whether the JSON stands in a block that begins with ```` ```json ```` and ends with ```` ``` ````; the last such block counts.
    /// Otherwise the whole completion is JSON.
    pub block: bool,
    /// The keys that have to be there, at the top; with any, the JSON has to be an object.
    pub required_keys: Vec<String>,
}

impl Default for JsonConfig {
    fn default() -> Self {
        Self { weight: 1.0, block: false, required_keys: Vec::new() }
    }
}

/// The reward `json`: 1 for valid JSON with the keys that are required, else 0.
#[derive(Clone, Debug, Default)]
pub struct Json(pub JsonConfig);

impl RewardFn for Json {
    fn name(&self) -> &str {
        "json"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let text = if self.0.block { last_block(input.completion) } else { Some(input.completion) };
        let value = text.and_then(|text| serde_json::from_str::<Value>(text.trim()).ok());
        let complete = |value: &Value| self.0.required_keys.iter().all(|key| value.get(key).is_some());
        Some(f32::from(value.is_some_and(|value| complete(&value))))
    }
}

/// What stands in the last ```` ```json ```` block that has an end.
fn last_block(text: &str) -> Option<&str> {
    let blocks = text.match_indices("```json");
    blocks.filter_map(|(at, fence)| text[at + fence.len()..].split_once("```").map(|(inside, _)| inside)).last()
}
