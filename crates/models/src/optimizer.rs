//! The names of optimizers, and the state that they keep for each trained weight. `grpo_policy` has their rules.

use crate::weights::Dtype;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An optimizer, with its name in `transformers`. It decides the update rule and the format of its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OptimizerName {
    /// AdamW with f32 moments.
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// AdamW with moments in 8 bits and a scale per block of 256 values, as in bitsandbytes. Tensors with fewer than 4096 values have f32
    /// moments.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
    /// SGD with momentum.
    #[serde(rename = "sgd")]
    Sgd,
    /// Muon for the matrices of layers, and AdamW for embeddings, head, norms and biases.
    #[serde(rename = "muon")]
    Muon,
}

/// The number of values of 8-bit moments that share a scale.
pub const MOMENT_BLOCK: usize = 256;

impl OptimizerName {
    /// All optimizers.
    pub const ALL: [Self; 4] = [Self::AdamW, Self::AdamW8bit, Self::Sgd, Self::Muon];

    /// Returns the names of the tensors of the state in memory tables, each with the size of the trained weights. If matrices of layers have
    /// fewer tensors than other weights, this is an upper bound.
    pub fn moments(self) -> &'static [&'static str] {
        match self {
            Self::AdamW | Self::AdamW8bit | Self::Muon => &["first moments", "second moments"],
            Self::Sgd => &["momentum buffers"],
        }
    }

    /// Returns `true` if moments have 8 bits.
    pub fn is_eight_bit(self) -> bool {
        self == Self::AdamW8bit
    }

    /// Returns the bytes of one moment of this number of weights. 8-bit moments count as if all blocks were full, and small tensors as if
    /// they had 8 bits, too.
    pub fn moment_bytes(self, count: u64) -> u64 {
        let single = Dtype::F32.size() as u64;
        match self.is_eight_bit() {
            false => count.saturating_mul(single),
            true => count.saturating_add(count.div_ceil(MOMENT_BLOCK as u64) * single),
        }
    }

    /// Returns the name of the format of moments in memory tables.
    pub(crate) fn moment_label(self) -> &'static str {
        if self.is_eight_bit() { "8 bits" } else { "float32" }
    }
}

/// Writes the name in configurations.
impl fmt::Display for OptimizerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
