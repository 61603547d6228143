//! Conversations after their end.

use grpo_agents::Outcome;
use grpo_policy::Completion;
use grpo_rewards::Conversation;
use std::time::Duration;

/// Returns the random stream of a turn, both counted from 0: the upper 32 bits have the turn, the lower ones the conversation.
pub(crate) fn stream(turn: u64, conversation: u64) -> u64 {
    (turn << 32) + conversation
}

/// Conversations after their end.
pub(crate) struct Conversations {
    pub(crate) ended: Vec<Ended>,
    /// The time in which environments answered.
    pub(crate) environment_time: Duration,
}

/// A conversation after its end.
pub(crate) struct Ended {
    pub(crate) prompt: Vec<u32>,
    pub(crate) completion: Completion,
    /// The last message of the assistant.
    pub(crate) text: String,
    pub(crate) conversed: Conversed,
}

/// The messages and counts of a finished conversation.
#[derive(Clone, Debug, Default)]
pub struct Conversed {
    /// Its messages after the prompt, its reward and its failure.
    pub conversation: Conversation,
    /// The text of all turns, with special tokens.
    pub transcript: String,
    /// The index of its environment; `None` if the row names no known environment.
    pub environment: Option<usize>,
    /// The part of the environment, with its failure.
    pub outcome: Outcome,
    /// `true` if the conversation has ended because a message of the environment was too long for the rest of its completion.
    pub lacks_room: bool,
    /// The number of answers to an agent without the tool call or the JSON that their request expects.
    pub unmet: usize,
    /// The number of messages of the assistant.
    pub turns: usize,
    /// The number of tool calls.
    pub calls: usize,
    /// The number of tool calls that failed.
    pub failed_calls: usize,
    /// The prompts and the completions of other rows: an agent may edit its messages, or hold several conversations, and the chat template may
    /// rewrite earlier turns.
    pub other_rows: Vec<(Vec<u32>, Completion)>,
}
