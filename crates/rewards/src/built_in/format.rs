//! Rewards for the layout `<think>...</think><answer>...</answer>`.

use crate::patterns::regex;
use crate::reward_fn::{RewardFn, RewardInput};
use std::borrow::Cow;

/// The reward `think_format`: 1 if the whole completion is `<think>...</think><answer>...</answer>`, with only white space around and
/// between the two, else 0. A `<think>` at the end of the prompt counts as part of the completion.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThinkFormat;

regex!(LAYOUT, r"(?s)\A\s*<think>.*?</think>\s*<answer>.*?</answer>\s*\z");

impl RewardFn for ThinkFormat {
    fn name(&self) -> &str {
        "think_format"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(f32::from(LAYOUT.is_match(&with_opening(input))))
    }
}

/// Returns the completion, preceded by `<think>` if the prompt ends with it.
fn with_opening<'a>(input: &RewardInput<'a>) -> Cow<'a, str> {
    if input.opens_think { Cow::Owned(format!("<think>{}", input.completion)) } else { Cow::Borrowed(input.completion) }
}

/// The reward `tag_count`: a quarter for each of `<think>`, `</think>`, `<answer>` and `</answer>` that occurs exactly once. A `<think>` at
/// the end of the prompt counts as part of the completion.
#[derive(Clone, Copy, Debug, Default)]
pub struct TagCount;

impl RewardFn for TagCount {
    fn name(&self) -> &str {
        "tag_count"
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        let text = with_opening(input);
        let tags = ["<think>", "</think>", "<answer>", "</answer>"];
        Some(tags.iter().filter(|tag| text.matches(**tag).count() == 1).count() as f32 / tags.len() as f32)
    }
}
