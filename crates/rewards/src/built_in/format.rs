//! Rewards for the layout `<think>...</think><answer>...</answer>`.

use crate::reward_fn::{RewardFn, RewardInput};
use regex::Regex;
use std::sync::LazyLock;

/// The reward `think_format`: 1 when the whole completion is `<think>...</think><answer>...</answer>`, with nothing but white
/// space around and between the two, else 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThinkFormat;

static LAYOUT: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"(?s)\A\s*<think>.*?</think>\s*<answer>.*?</answer>\s*\z";
    Regex::new(pattern).expect("the pattern is a constant")
});

impl RewardFn for ThinkFormat {
    fn name(&self) -> &str {
        "think_format"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(LAYOUT.is_match(input.completion)))
    }
}

/// The reward `tag_count`: a quarter for each of `<think>`, `</think>`, `<answer>` and `</answer>` that is in the completion
/// exactly once.
#[derive(Clone, Copy, Debug, Default)]
pub struct TagCount;

impl RewardFn for TagCount {
    fn name(&self) -> &str {
        "tag_count"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let tags = ["<think>", "</think>", "<answer>", "</answer>"];
        Some(tags.iter().filter(|tag| input.completion.matches(**tag).count() == 1).count() as f32 / tags.len() as f32)
    }
}
