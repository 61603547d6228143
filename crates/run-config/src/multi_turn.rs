//! The section `rollout.multi_turn`: the limits of conversations with environments.

use grpo_agents::{ReasoningParser, ToolParser};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The limits of conversations with environments. The whole conversation behind its prompt, with the tokens of tools and environments, has at
/// most `rollout.max_completion_length` tokens.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MultiTurnConfig {
    /// The maximum number of messages of the assistant; `None` has no limit other than the length.
    pub max_assistant_turns: Option<usize>,
    /// The maximum number of messages of the assistant whose tool calls are executed, as in TRL; `None` has no limit.
    pub max_tool_calling_iterations: Option<usize>,
    /// The maximum number of characters of a message of a tool or an environment; longer ones are cut and marked, as in verl. `None` cuts
    /// none.
    pub max_tool_response_length: Option<usize>,
    /// The part of a longer message that is kept.
    pub tool_response_truncate_side: TruncateSide,
    /// The format of tool calls, by vLLM's names; `None` is the format that the chat template writes.
    pub tool_parser: Option<ToolParser>,
    /// The format of thoughts, in which a tool call is none, by vLLM's names; `None` recognizes thoughts by their marks.
    pub reasoning_parser: Option<ReasoningParser>,
    /// The number of consecutive conversations in which an environment may fail before the run ends, at least 1. Until then, such a
    /// conversation is left out of its step.
    #[default(256)]
    pub max_consecutive_failures: u64,
}

/// The part of a message that is kept, by verl's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncateSide {
    /// The beginning is kept.
    Left,
    /// Both ends are kept.
    #[default]
    Middle,
    /// The end is kept.
    Right,
}

impl MultiTurnConfig {
    /// Returns a message of at most `max_tool_response_length` characters, and a mark where it was cut.
    ///
    /// ```
    /// use grpo_run_config::{MultiTurnConfig, TruncateSide};
    ///
    /// let cut = |tool_response_truncate_side| {
    ///     let config = MultiTurnConfig { max_tool_response_length: Some(4), tool_response_truncate_side, ..Default::default() };
    ///     config.cut("abcdefgh").into_owned()
    /// };
    /// assert_eq!(cut(TruncateSide::Left), "abcd...(truncated)");
    /// assert_eq!(cut(TruncateSide::Middle), "ab...(truncated)...gh");
    /// assert_eq!(cut(TruncateSide::Right), "(truncated)...efgh");
    /// ```
    pub fn cut<'a>(&self, text: &'a str) -> std::borrow::Cow<'a, str> {
        let Some(most) = self.max_tool_response_length else { return text.into() };
        let count = text.chars().count();
        if count <= most {
            return text.into();
        }
        let first = |count: usize| text.chars().take(count).collect::<String>();
        let last = |kept: usize| text.chars().skip(count - kept).collect::<String>();
        match self.tool_response_truncate_side {
            TruncateSide::Left => format!("{}...(truncated)", first(most)).into(),
            TruncateSide::Middle => format!("{}...(truncated)...{}", first(most / 2), last(most / 2)).into(),
            TruncateSide::Right => format!("(truncated)...{}", last(most)).into(),
        }
    }
}
