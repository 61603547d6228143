//! The trait of reward functions, with its inputs and results.

use grpo_data::Item;
use serde_json::Value;

/// A completion to score.
#[derive(Clone, Copy)]
pub struct RewardInput<'a> {
    /// The row of the data set: prompt, reference answer, other columns.
    pub item: &'a Item,
    /// The completion as text, without special tokens.
    pub completion: &'a str,
    /// `true` if the completion reached the length limit before EOS.
    pub truncated: bool,
    /// The completion's token ids, including EOS.
    pub completion_ids: &'a [u32],
    /// `true` if the prompt ends with `<think>`, as with some chat templates; the completion then starts after the tag.
    pub opens_think: bool,
    /// The conversation with an environment; `None` for completions of one turn. `completion` is then the last message of the assistant, and
    /// `completion_ids` has the tokens of all turns, those of tools and environments included.
    pub conversation: Option<&'a Conversation>,
}

/// A conversation between the policy and an environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages behind the prompt: those of the assistant, with their `tool_calls`, and those of tools and of the environment. Of an agent, which
    /// writes its own prompts, all messages of its last request, and the answer.
    pub messages: Vec<Value>,
    /// The sum of the rewards of the environment; `None` if it has given none.
    pub reward: Option<f32>,
    /// The number of tokens that the policy has sampled.
    pub sampled_tokens: usize,
    /// The reason why the environment failed. Such a conversation has no reward.
    pub failure: Option<String>,
}

impl<'a> RewardInput<'a> {
    /// Returns the input for a completion that ended by itself, without its token ids.
    pub fn new(item: &'a Item, completion: &'a str) -> Self {
        Self { item, completion, truncated: false, completion_ids: &[], opens_think: false, conversation: None }
    }

    /// Returns the number of tokens that the policy has sampled, including EOS.
    pub fn completion_len(&self) -> usize {
        self.conversation.map_or(self.completion_ids.len(), |conversation| conversation.sampled_tokens)
    }
}

/// A function that scores completions. Implement it to train on your own reward.
pub trait RewardFn: Send + Sync {
    /// Returns the name of the reward in metrics.
    fn name(&self) -> &str;

    /// Returns the reward, or `None` if the function does not apply to the completion. It is then left out of the sum; a completion to
    /// which no function applies is left out of its group's statistics.
    fn score(&self, input: &RewardInput<'_>) -> Option<f32>;

    /// Returns `true` if the function returns `None` for rows of files without a reference answer.
    fn needs_answer(&self) -> bool {
        false
    }

    /// Returns the rewards of a batch of completions, in order. A batch is a whole rollout, so that a function can send all of it to
    /// another process at once. The default calls [`RewardFn::score`] for each completion.
    ///
    /// # Errors
    /// Each completion has its own result. A completion that the function failed to score is left out of the step, and the failure is
    /// counted.
    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        inputs.iter().map(|input| Ok(self.score(input))).collect()
    }
}

/// The result of a reward function for a completion: a reward, `None` if the function does not apply, or an error.
pub type Score = std::result::Result<Option<f32>, RewardFailure>;

/// The reason why a reward function could not score a completion.
///
/// ```
/// let failure = grpo_rewards::RewardFailure::new("the program has exited with status 1");
/// assert!(failure.to_string().contains("status 1"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RewardFailure {
    message: String,
}

impl RewardFailure {
    /// Returns a failure with a message for users.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// Returns the default weight of a reward with its own section.
pub(crate) fn one() -> f32 {
    1.0
}
