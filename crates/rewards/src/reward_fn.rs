//! The seam: what a reward function is given, and what it says.

use data::{Problem, Task};

/// A completion to be judged.
#[derive(Clone, Copy)]
pub struct RewardInput<'a> {
    /// The problem that was posed.
    pub problem: &'a Problem,
    /// The task that the problem came from.
    pub task: &'a dyn Task,
    /// The text that the policy wrote, without special tokens.
    pub completion: &'a str,
    /// Whether the length limit cut it off before EOS.
    pub truncated: bool,
    /// The number of its tokens, EOS included.
    pub completion_len: usize,
}

/// A function that judges completions. Implement it to train on your own reward.
pub trait RewardFn: Send + Sync {
    /// The name of the reward in metrics.
    fn name(&self) -> &str;

    /// The reward, or `None` when this function has nothing to say about the completion: it is then left out of the
    /// sum, and a completion about which no function has anything to say is left out of its group's statistics.
    fn score(&self, input: &RewardInput<'_>) -> Option<f32>;
}
