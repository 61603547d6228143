//! Sampling of completions: requests, results, and the engines that sample.

use crate::error::Result;
use crate::policy::Policy;
use crate::sampling::Sampling;
use serde::{Deserialize, Serialize};

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

    /// Returns texts that end a completion when they are complete, so that an engine in another program can stop early; empty if the
    /// condition is not about texts.
    fn texts(&self) -> &[String] {
        &[]
    }
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
    /// The weights that the tokens were sampled from, in order; empty if they are the weights that the policy has now.
    pub weight_versions: Vec<WeightVersion>,
}

/// Tokens of a completion that were sampled from the same weights, with the field names of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightVersion {
    /// The version of the weights, as in [`RolloutEngine::update_weights`].
    pub version: u64,
    /// The index of the first token.
    pub start: usize,
    /// The index behind the last token.
    pub end: usize,
}

/// Completions that an engine samples in the background; see [`RolloutEngine::start`].
pub struct Pending(Box<Wait>);

type Wait = dyn FnOnce(&RolloutRequest<'_>) -> Result<Vec<Completion>> + Send;

impl Pending {
    /// Wraps the function that waits for the completions of a request.
    pub fn new(wait: impl FnOnce(&RolloutRequest<'_>) -> Result<Vec<Completion>> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Waits for the completions of `request`, which equals the request of [`RolloutEngine::start`].
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`].
    pub fn wait(self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        (self.0)(request)
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
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

    /// Takes the weights of `policy`, from which all later requests sample, as `version`: the number of GRPO steps that have trained them.
    /// The trainer calls it before it samples, whenever the weights may have changed. An engine that samples from the policy itself needs no
    /// copy, so the default does nothing.
    ///
    /// # Errors
    /// Any error that prevents the update; requests must then fail, too, because they would sample from other weights.
    fn update_weights(&mut self, policy: &dyn Policy, version: u64) -> Result<()> {
        let _ = (policy, version);
        Ok(())
    }

    /// Starts to sample the completions of a request in the background, from the weights of the last [`RolloutEngine::update_weights`]. If
    /// the pending completions are dropped, the engine stops sampling them.
    ///
    /// # Errors
    /// The default returns [`crate::Error::Argument`]: the engine samples only while its caller waits.
    fn start(&mut self, request: &RolloutRequest<'_>) -> Result<Pending> {
        let _ = request;
        let expected = "a rollout engine that samples in the background, for rollout.max_staleness above 0";
        Err(crate::Error::argument("start", expected, "one that does not"))
    }
}

/// The engine that samples on the policy's device, with [`Policy::generate`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyEngine;

impl RolloutEngine for PolicyEngine {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        policy.generate(request)
    }
}
