//! The options of rollouts and of their requests.

#[cfg(doc)]
use grpo_policy::RolloutRequest;
use grpo_policy::Sampling;
use smart_default::SmartDefault;

/// Options of a rollout.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq)]
pub struct RolloutOptions {
    /// Largest number of sequences that decode concurrently: more need more memory for the KV cache and are faster.
    #[default(64)]
    pub slots: usize,
    /// Largest number of tokens per sequence that one call of the decode program adds. Slots of finished sequences are reused between
    /// calls. Another value changes the order of sums in attention, and so the last bits of the results.
    #[default(16)]
    pub tokens_per_call: usize,
}

/// The options of requests on which their programs depend.
#[derive(Clone, Copy, Debug)]
pub struct RequestOptions<'a> {
    /// How tokens are sampled.
    pub sampling: &'a Sampling,
    /// `true` if completions have the token ids that sampling kept, as requested by [`RolloutRequest::return_sampling_mask`].
    pub return_sampling_mask: bool,
    /// `true` if completions have the experts of their tokens, as requested by [`RolloutRequest::return_routed_experts`]; for a model with experts.
    pub return_routed_experts: bool,
    /// The number of stop ids.
    pub stop_ids: usize,
}

impl<'a> RequestOptions<'a> {
    /// Creates the options of requests that return neither sampling masks nor experts.
    pub fn new(sampling: &'a Sampling, stop_ids: usize) -> Self {
        Self { sampling, return_sampling_mask: false, return_routed_experts: false, stop_ids }
    }
}
