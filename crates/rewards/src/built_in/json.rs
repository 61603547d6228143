//! The reward for valid JSON.

use crate::reward_fn::{RewardFn, RewardInput};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smart_default::SmartDefault;

/// The settings of the reward `json`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JsonConfig {
    /// The weight of the reward.
    #[default(1.0)]
    pub weight: f32,
    /// `true` if the JSON is in a block that begins with ```` ```json ```` and ends with ```` ``` ````; the last complete block is used.
    /// Otherwise the whole completion is the JSON.
    pub block: bool,
    /// The required top-level keys; if there are any, the JSON must be an object.
    pub required_keys: Vec<String>,
}

/// The reward `json`: 1 for valid JSON with the required keys, else 0.
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

/// Returns the contents of the last complete ```` ```json ```` block.
fn last_block(text: &str) -> Option<&str> {
    let blocks = text.match_indices("```json");
    blocks.filter_map(|(at, fence)| text[at + fence.len()..].split_once("```").map(|(inside, _)| inside)).last()
}
