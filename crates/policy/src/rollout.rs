//! Sampling of completions: requests, results, and the engines that sample.

use crate::error::{Error, Result};
use crate::policy::Policy;
use crate::routed_experts::RoutedExperts;
use crate::sampling::Sampling;
use grpo_core::batch::SamplingMask;
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
    /// `true` if completions have the ids that every token was sampled from ([`Completion::sampling_mask`]).
    pub return_sampling_mask: bool,
    /// `true` if completions have the experts of their tokens ([`Completion::routed_experts`]).
    pub return_routed_experts: bool,
    /// The conversations that the completions continue; `None` for completions of one turn.
    pub turn: Option<Turn<'a>>,
}

impl<'a> RolloutRequest<'a> {
    /// Creates a request for one completion per prompt, of at most `max_completion_length` tokens, without tokens that end one.
    pub fn new(prompts: &'a [Vec<u32>], max_completion_length: usize, sampling: Sampling) -> Self {
        Self {
            prompts,
            num_generations: 1,
            max_completion_length,
            stop_ids: &[],
            stop: None,
            sampling,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        }
    }

    /// Sets the number of completions per prompt.
    #[must_use]
    pub fn with_num_generations(self, num_generations: usize) -> Self {
        Self { num_generations, ..self }
    }

    /// Sets the ids of the tokens that end a completion.
    #[must_use]
    pub fn with_stop_ids(self, stop_ids: &'a [u32]) -> Self {
        Self { stop_ids, ..self }
    }
}

/// One turn of many conversations: every prompt holds the tokens of a conversation so far, and every completion is its next turn.
///
/// A policy may keep the KV caches of the sequences of such a request until its next method call that is not [`Policy::generate`]. A later
/// request whose prompts begin with these sequences then only processes the new tokens.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// `[prompts * num_generations]`: the random stream of each completion, relative to `first` of [`Sampling::Random`], so that a conversation has the same samples
    /// whichever other conversations are still open.
    pub streams: &'a [u64],
    /// `[prompts * num_generations]`: the largest number of tokens of each completion, from 1 to [`RolloutRequest::max_completion_length`].
    pub limits: &'a [usize],
    /// Receives finished completions while others are sampled; `None` if the caller waits for all of them.
    pub finished: Option<&'a dyn Finished>,
}

/// Receives finished completions before [`RolloutEngine::generate`] returns all of them. Engines need not report them.
pub trait Finished: std::fmt::Debug + Sync {
    /// Is called once for completion `index` of the request, from any thread.
    fn finished(&self, index: usize, completion: &Completion);
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
    /// Returns the random stream of completion `index` of the request, relative to `first` of [`Sampling::Random`].
    pub fn stream(&self, index: usize) -> u64 {
        self.turn.and_then(|turn| turn.streams.get(index).copied()).unwrap_or(index as u64)
    }

    /// Returns the largest number of tokens of completion `index` of the request.
    pub fn limit(&self, index: usize) -> usize {
        let limit = self.turn.and_then(|turn| turn.limits.get(index).copied());
        limit.unwrap_or(self.max_completion_length).min(self.max_completion_length)
    }

    /// Returns the largest number of tokens of a sequence of the request, prompt and completion together.
    pub fn longest_sequence(&self) -> usize {
        let completions = |prompt: usize| prompt * self.num_generations..(prompt + 1) * self.num_generations;
        let longest = |prompt: usize| completions(prompt).map(|index| self.limit(index)).max().unwrap_or(0);
        self.prompts.iter().enumerate().map(|(prompt, ids)| ids.len() + longest(prompt)).max().unwrap_or(0)
    }

    /// Reports completion `index`, which is finished, to the listener of the request, if there is one.
    pub fn report(&self, index: usize, completion: &Completion) {
        if let Some(listener) = self.turn.and_then(|turn| turn.finished) {
            listener.finished(index, completion);
        }
    }

    /// Checks that the request has prompts, completions and tokens, and a stream and a limit for every completion of a turn.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check(&self) -> Result<()> {
        let Self { prompts, num_generations, max_completion_length, .. } = self;
        let count = prompts.len() * num_generations;
        if count == 0 || *max_completion_length == 0 {
            let found = format!("{} x {num_generations} x {max_completion_length}", prompts.len());
            return Err(Error::argument("generate", "at least one prompt, generation and token", found));
        }
        match self.turn {
            Some(Turn { streams, limits, .. })
                if streams.len() != count || limits.len() != count || limits.contains(&0) =>
            {
                let expected = format!("a stream and a limit of at least one token for each of {count} completions");
                let found = format!("{} streams and the limits {limits:?}", streams.len());
                Err(Error::argument("generate", expected, found))
            }
            _ => Ok(()),
        }
    }

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

/// One completion: the tokens of a conversation behind its prompt. In conversations of several turns, the tokens of tools and environments
/// stand between the sampled ones; `mask` tells them apart.
///
/// ```
/// use grpo_policy::Completion;
///
/// // Two sampled tokens, two tokens of a tool, and one sampled token.
/// let mut completion = Completion::sampled(vec![7, 2], vec![-0.5, -0.1], false);
/// completion.append_given(&[9, 9]);
/// completion.append(Completion::sampled(vec![2], vec![-0.3], false));
/// assert_eq!(completion.mask, [true, true, false, false, true]);
/// assert_eq!((completion.logps[2], completion.sampled_len()), (0.0, 3));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// `[T]` token ids; unless `truncated`, the last one is a stop id or meets the stop condition.
    pub ids: Vec<u32>,
    /// `[T]`: log-probability (nats) of each sampled token under the distribution that it was sampled from; for greedy sampling, under
    /// softmax(logits). 0 for other tokens.
    pub logps: Vec<f32>,
    /// `[T]`: `true` for tokens that the policy sampled, `false` for tokens of tools and environments. Loss, metrics and lengths are over sampled
    /// tokens.
    pub mask: Vec<bool>,
    /// `true` if the completion reached the length limit without a stop token.
    pub truncated: bool,
    /// `[T]`: the ids that top_k, top_p and min_p kept for each sampled token, none if they kept the whole vocabulary; a mask of no tokens
    /// unless [`RolloutRequest::return_sampling_mask`].
    pub sampling_mask: SamplingMask,
    /// The experts of all tokens of prompt and completion but the last, which is no input of the model; none unless [`RolloutRequest::return_routed_experts`].
    pub routed_experts: RoutedExperts,
    /// The weights that the sampled tokens were sampled from, in order; empty if they are the weights that the policy has now.
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

impl Completion {
    /// Returns a completion whose tokens were all sampled. `ids` and `logps` have the same length.
    pub fn sampled(ids: Vec<u32>, logps: Vec<f32>, truncated: bool) -> Self {
        Self { mask: vec![true; ids.len()], ids, logps, truncated, ..Self::default() }
    }

    /// Returns the number of sampled tokens.
    pub fn sampled_len(&self) -> usize {
        self.mask.iter().filter(|sampled| **sampled).count()
    }

    /// Appends tokens that were not sampled.
    pub fn append_given(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
        self.logps.resize(self.ids.len(), 0.0);
        self.mask.resize(self.ids.len(), false);
    }

    /// Drops all tokens but the first `length`. If experts are recorded, the dropped tokens must be sampled ones.
    pub fn truncate(&mut self, length: usize) {
        self.routed_experts.drop_last(self.ids.len().saturating_sub(length));
        self.ids.truncate(length);
        self.logps.truncate(length);
        self.mask.truncate(length);
        self.sampling_mask.resize(self.sampling_mask.tokens().min(length));
        self.weight_versions.retain_mut(|span| {
            span.end = span.end.min(length);
            span.start < span.end
        });
    }

    /// Appends the next turn. The result is truncated if the turn is.
    pub fn append(&mut self, turn: Self) {
        let begin = self.ids.len();
        let moved = |span: WeightVersion| WeightVersion { start: begin + span.start, end: begin + span.end, ..span };
        self.weight_versions.extend(turn.weight_versions.into_iter().map(moved));
        if turn.sampling_mask.tokens() > 0 {
            self.sampling_mask.resize(begin);
            self.sampling_mask.extend(&turn.sampling_mask);
        }
        // A turn has the experts of the whole sequence.
        if !turn.routed_experts.ids.is_empty() {
            self.routed_experts = turn.routed_experts;
        }
        self.ids.extend(turn.ids);
        self.logps.extend(turn.logps);
        self.mask.extend(turn.mask);
        self.truncated = turn.truncated;
    }
}

/// A source of completions for the training loop. Implement it to sample elsewhere, with weights from [`Policy::export`].
///
/// ```
/// use grpo_policy::{Completion, Policy, PolicyEngine, RolloutEngine, RolloutRequest};
///
/// /// Samples with the policy and counts tokens.
/// struct Counted(usize);
/// impl RolloutEngine for Counted {
///     fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
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

    /// Returns the number of tokens of the longest sequence that the engine takes, if it is limited; the policy has a limit of its own.
    fn context_length(&self) -> Option<usize> {
        None
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_masks_follow_the_tokens_of_turns() {
        let turn = |ids: &[u32], kept: &[u32]| {
            let mut sampling_mask = SamplingMask::default();
            ids.iter().for_each(|_| sampling_mask.push(kept));
            let completion = Completion::sampled(ids.to_vec(), vec![-0.5; ids.len()], false);
            Completion { sampling_mask, ..completion }
        };
        let mut completion = Completion::default();
        completion.append_given(&[9]);
        completion.append(turn(&[7, 2], &[7, 2]));
        completion.append_given(&[9, 9]);
        completion.append(turn(&[3], &[4, 3]));
        let kept = |completion: &Completion| {
            let mask = &completion.sampling_mask;
            (0..mask.tokens()).map(|token| mask.kept(token).map(<[u32]>::to_vec)).collect::<Vec<_>>()
        };
        let first = Some(vec![2, 7]);
        assert_eq!(kept(&completion), [None, first.clone(), first.clone(), None, None, Some(vec![3, 4])]);
        completion.truncate(2);
        assert_eq!(kept(&completion), [None, first]);
        assert_eq!([completion.ids.len(), completion.logps.len(), completion.mask.len()], [2; 3]);
        // A completion without masks stays one.
        let mut plain = Completion::sampled(vec![7, 2], vec![-0.5; 2], false);
        plain.append(Completion::sampled(vec![3], vec![-0.5], false));
        plain.truncate(1);
        assert_eq!(plain.sampling_mask, SamplingMask::default());
    }
}
