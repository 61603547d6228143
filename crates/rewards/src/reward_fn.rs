//! The seam: what a reward function is given, and what it says.

use data::Item;

/// A completion to be judged.
#[derive(Clone, Copy)]
pub struct RewardInput<'a> {
    /// The row of the data set: prompt, reference answer, other columns.
    pub item: &'a Item,
    /// The text that the policy wrote, without special tokens.
    pub completion: &'a str,
    /// Whether the length limit cut it off before EOS.
    pub truncated: bool,
    /// Its tokens, EOS included.
    pub completion_ids: &'a [u32],
    /// Whether the prompt ends with `<think>`, as some chat templates do: the completion then begins behind the tag.
    pub opens_think: bool,
}

impl RewardInput<'_> {
    /// The number of tokens of the completion, EOS included.
    pub fn completion_len(&self) -> usize {
        self.completion_ids.len()
    }
}

/// A function that judges completions. Implement it to train on your own reward.
pub trait RewardFn: Send + Sync {
    /// The name of the reward in metrics.
    fn name(&self) -> &str;

    /// The reward, or `None` when this function has nothing to say about the completion: it is then left out of the
    /// sum, and a completion about which no function has anything to say is left out of its group's statistics.
    fn score(&self, input: &RewardInput<'_>) -> Option<f32>;

    /// Returns `true` if the function has nothing to say about rows of files without a right answer.
    fn needs_answer(&self) -> bool {
        false
    }

    /// The rewards of a batch of completions, in their order: all of a rollout at once, so that a function that asks another
    /// process can do it in one go. The default calls [`RewardFn::score`] for each.
    ///
    /// # Errors
    /// Each completion has a result of its own: what kept the function from judging it. Its row is then left out like one without
    /// a reward, and the failure is counted.
    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        inputs.iter().map(|input| Ok(self.score(input))).collect()
    }
}

/// What a reward function says of a completion: a reward, nothing (`None`), or why it cannot judge it.
pub type Score = std::result::Result<Option<f32>, RewardFailure>;

/// What kept a reward function from judging a completion.
///
/// ```
/// let failure = rewards::RewardFailure::new("the program has exited with status 1");
/// assert!(failure.to_string().contains("status 1"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RewardFailure {
    message: String,
}

impl RewardFailure {
    /// A failure with a message for people.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}
