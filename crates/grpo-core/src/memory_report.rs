//! Memory of a call.

use serde::{Deserialize, Serialize};

/// Bytes that one call at `max_tokens` needs, known before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The policy's output: logits, or hidden states, head and bias.
    pub inputs: usize,
    /// Gradients (unless in place) and per-token results.
    pub outputs: usize,
    /// Everything else that the plan allocates.
    pub workspace: usize,
}

impl MemoryReport {
    /// Returns the sum; saturates on overflow.
    pub fn total(&self) -> usize {
        self.inputs.saturating_add(self.outputs).saturating_add(self.workspace)
    }
}
