//! A sample of a step.

use grpo_policy::WeightVersion;
use grpo_rewards::Reward;

/// A sampled completion with its reward and advantage.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name of the task.
    pub task: String,
    /// The text of the prompt.
    pub prompt: String,
    /// The reference answer.
    pub answer: String,
    /// The text that the policy wrote, without EOS; with environments, the whole conversation with special tokens.
    pub completion: String,
    /// `true` if the length limit cut the completion off.
    pub truncated: bool,
    /// The rewards of the completion, without the KL penalty.
    pub reward: Reward,
    /// The advantage of the completion, scaled by `grpo.advantage_scale`; with per-token advantages, their mean.
    pub advantage: f32,
    /// The weights that the tokens were sampled from, by the number of GRPO steps that had trained them; empty if all tokens were sampled from
    /// the weights at the start of the step.
    pub weight_versions: Vec<WeightVersion>,
}
