//! Prompts with completions, to be scored or trained on.

use crate::routed_experts::RoutedExperts;
use grpo_core::TokenBatch;

/// A prompt and its completion, as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids of the prompt, special tokens included; at least one.
    pub prompt: Vec<u32>,
    /// Token ids of the completion, with EOS unless it was truncated; at least one.
    pub completion: Vec<u32>,
}

/// One micro-batch: B sequences with N completion tokens in all.
///
/// ```
/// use grpo_policy::{Sequence, SequenceBatch, token_batch};
///
/// # fn main() -> Result<(), grpo_core::Error> {
/// let sequences = [Sequence { prompt: vec![1, 5], completion: vec![7, 2] }];
/// let batch = SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: token_batch(&sequences)? };
/// assert_eq!(batch.tokens.targets(), [7, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SequenceBatch<'a> {
    /// The sequences `[B]`.
    pub sequences: &'a [Sequence],
    /// The completion tokens `[N]` of the same sequences with the inputs of the loss: mask, advantages, weights, recorded
    /// log-probabilities.
    pub tokens: TokenBatch,
    /// The recorded experts of each sequence `[B]`, which replace the choices of the policy's routers; empty if the routers choose.
    pub routed_experts: &'a [RoutedExperts],
}

/// Returns the concatenated completion tokens of `sequences` as targets of a loss. All other columns are unset.
///
/// # Errors
/// See [`TokenBatch::packed`].
pub fn token_batch(sequences: &[Sequence]) -> Result<TokenBatch, grpo_core::Error> {
    let targets = sequences.iter().flat_map(|s| s.completion.iter().map(|id| i64::from(*id))).collect();
    let offsets = std::iter::once(0)
        .chain(sequences.iter().scan(0, |end, s| {
            *end += s.completion.len();
            Some(*end)
        }))
        .collect();
    TokenBatch::packed(targets, offsets)
}
