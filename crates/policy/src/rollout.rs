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
    /// What ends a completion beside these tokens; `None` is nothing.
    pub stop: Option<&'a dyn StopCondition>,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// What ends a completion beside the tokens of [`RolloutRequest::stop_ids`], such as a text in it.
pub trait StopCondition: std::fmt::Debug + Sync {
    /// Returns `true` if a completion of these tokens ends with the last of them. It is called for every length of a completion, from the
    /// shortest on.
    fn is_met(&self, completion: &[u32]) -> bool;
}

impl RolloutRequest<'_> {
    /// Returns `true` if a completion of these tokens ends with the last of them.
    pub fn ends(&self, completion: &[u32]) -> bool {
        completion.last().is_some_and(|id| self.stop_ids.contains(id))
            || self.stop.is_some_and(|stop| stop.is_met(completion))
    }

    /// The number of tokens after which [`RolloutRequest::stop`] ends a completion, of which the first `checked` do not.
    pub fn stopped_at(&self, completion: &[u32], checked: usize) -> Option<usize> {
        let stop = self.stop?;
        (checked + 1..=completion.len()).find(|length| stop.is_met(&completion[..*length]))
    }
}

/// One completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The token ids; the last one is one of the stop ids, or meets the stop condition, unless `truncated`.
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
