//! The trait of what a worker measures.

use super::inputs::Inputs;
use super::protocol::Stepped;
use crate::error::Result;

/// A variant that can run steps repeatedly.
pub(crate) trait Runner {
    /// Runs one timed step. Inputs that a step consumes are restored before the timed part.
    fn step(&mut self, check: bool) -> Result<Stepped>;

    /// Scores the inputs: log-probabilities `[N]` in nats.
    fn score(&mut self) -> Result<Vec<f32>>;
}

/// Returns the bytes of the policy's output, including the bias if it is used.
pub(crate) fn input_bytes(inputs: &Inputs, has_bias: bool) -> u64 {
    let used = inputs.policy.tensors().filter(|(name, _)| *name != "bias" || has_bias);
    used.map(|(_, tensor)| (tensor.len() * tensor.dtype().bytes()) as u64).sum()
}
