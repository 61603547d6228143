//! Sampling of completions: requests, results, and the engines that sample.

use crate::error::Result;
use crate::policy::Policy;
use crate::sampling::Sampling;

/// Prompts to complete. The [crate documentation](crate) has an example.
#[derive(Clone, Copy, Debug)]
pub struct RolloutRequest<'a> {
    /// Token ids of each prompt, special tokens included.
    pub prompts: &'a [Vec<u32>],
    /// Number of completions per prompt.
    pub num_generations: usize,
    /// Largest number of tokens of a completion, EOS included.
    pub max_completion_length: usize,
    /// Ids of the tokens that end a completion.
    pub stop_ids: &'a [u32],
    /// Another condition that ends a completion; `None` if there is none.
    pub stop: Option<&'a dyn StopCondition>,
    /// How the next token is chosen.
    pub sampling: Sampling,
}

/// A condition that ends a completion, in addition to the tokens of [`RolloutRequest::stop_ids`], such as a text in it.
pub trait StopCondition: std::fmt::Debug + Sync {
    /// Returns `true` if the last of these tokens ends the completion. It is called for every length of a completion, shortest first.
    ///
    /// # Errors
    /// An error if the condition cannot be evaluated, such as tokens that cannot be decoded; it ends the request.
    fn is_met(&self, completion: &[u32]) -> Result<bool>;
}

impl RolloutRequest<'_> {
    /// Returns `true` if the last of these tokens ends the completion.
    ///
    /// # Errors
    /// The errors of [`StopCondition::is_met`].
    pub fn ends(&self, completion: &[u32]) -> Result<bool> {
        match self.stop {
            _ if completion.last().is_some_and(|id| self.stop_ids.contains(id)) => Ok(true),
            Some(stop) => stop.is_met(completion),
            None => Ok(false),
        }
    }

    /// Returns the number of tokens after which [`RolloutRequest::stop`] ends the completion. The first `checked` tokens are known not to
    /// meet it.
    ///
    /// # Errors
    /// The errors of [`StopCondition::is_met`].
    pub fn stopped_at(&self, completion: &[u32], checked: usize) -> Result<Option<usize>> {
        let Some(stop) = self.stop else { return Ok(None) };
        for length in checked + 1..=completion.len() {
            if stop.is_met(&completion[..length])? {
                return Ok(Some(length));
            }
        }
        Ok(None)
    }
}

/// One completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Token ids; unless `truncated`, the last one is a stop id or meets the stop condition.
    pub ids: Vec<u32>,
    /// Log-probability (nats) of each token under the distribution that it was sampled from; for greedy sampling, under softmax(logits).
    pub logps: Vec<f32>,
    /// `true` if the completion reached the length limit without a stop token.
    pub truncated: bool,
}

/// A source of completions for the training loop. Implement it to sample elsewhere, with weights from [`Policy::export`].
///
/// ```
/// use policy::{Completion, Policy, PolicyEngine, RolloutEngine, RolloutRequest};
///
/// /// Samples with the policy and counts tokens.
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
    /// Returns `num_generations` completions per prompt. Completions of one prompt are contiguous.
    ///
    /// # Errors
    /// Any error that prevents some of the completions.
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>>;
}

/// The engine that samples on the policy's device, with [`Policy::generate`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyEngine;

impl RolloutEngine for PolicyEngine {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        policy.generate(request)
    }
}
