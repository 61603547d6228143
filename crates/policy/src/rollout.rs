//! Sampling completions: requests, completions, and the engines that make them.

use crate::error::Result;
use crate::sampling::Sampling;
use crate::seam::Policy;

/// Prompts to complete. The [front page](crate) has an example.
#[derive(Clone, Copy, Debug)]
pub struct RolloutRequest<'a> {
    /// The token ids of each prompt, special tokens included.
    pub prompts: &'a [Vec<u32>],
    /// The number of completions per prompt.
    pub num_generations: usize,
    /// The largest number of tokens of a completion, EOS included.
    pub max_completion_length: usize,
    /// The ids of the tokens that end a completion.
    pub stop_ids: &'a [u32],
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// One completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The token ids; the last one is one of the stop ids unless `truncated`.
    pub ids: Vec<u32>,
    /// The log-probability (nats) of each token under the distribution it was drawn from; for greedy sampling, under
    /// softmax(logits).
    pub logps: Vec<f32>,
    /// Whether the length limit came before a token that ends the completion.
    pub truncated: bool,
}

/// Makes completions for a training loop. Implement it to sample elsewhere, with weights that [`Policy::export`] hands out.
///
/// ```
/// use policy::{Completion, Policy, PolicyEngine, RolloutEngine, RolloutRequest};
///
/// /// Samples with the policy, and counts tokens.
/// struct Counted(usize);
/// impl RolloutEngine for Counted {
///     fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> policy::Result<Vec<Completion>> {
///         let completions = PolicyEngine.generate(policy, request)?;
///         self.0 += completions.iter().map(|completion| completion.ids.len()).sum::<usize>();
///         Ok(completions)
///     }
/// }
/// ```
pub trait RolloutEngine: Send {
    /// `num_generations` completions per prompt, those of one prompt next to each other.
    ///
    /// # Errors
    /// Whatever keeps it from delivering all of them.
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>>;
}

/// The engine that samples where the weights are, with [`Policy::generate`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyEngine;

impl RolloutEngine for PolicyEngine {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        policy.generate(request)
    }
}
