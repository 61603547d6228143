//! How the operations of a decoder are computed.

use grpo_stablehlo::{Dtype, Precision};
use std::num::NonZeroUsize;

/// The dtype of the operands of matrix products and of the layers' results. Sums, norms and softmax are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 operands in full precision.
    F32,
    /// bfloat16 operands, residual stream and KV cache.
    Bf16,
}

impl Compute {
    /// Returns the dtype of operands.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }

    /// Returns the precision of products; TPUs round f32 operands by default.
    pub fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::Highest,
            Self::Bf16 => Precision::Default,
        }
    }
}

/// How attention among the tokens of a row is computed. All variants use f32 for sums and statistics, and agree up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// `Blockwise` with [`Attention::BLOCK`] for rows longer than one block, otherwise `Materialised`.
    #[default]
    Auto,
    /// Materialises the scores of all pairs of tokens for all heads: memory grows with the square of the length.
    Materialised,
    /// Computes blocks with running maxima and sums, as FlashAttention does: memory grows with the length, and blocks above the diagonal
    /// are skipped. The backward pass recomputes the scores.
    Blockwise {
        /// The largest number of tokens of a block.
        block: NonZeroUsize,
    },
}

impl Attention {
    /// Block size of [`Attention::Auto`]. The TPU compiler estimates, for a layer of Qwen2.5-0.5B with 8 rows of 1024 tokens, for attention
    /// and its derivative: 2.0 ms with blocks of 512, 2.2 ms with 256, 2.9 ms with 128, and 2.9 ms materialised.
    pub const BLOCK: NonZeroUsize = NonZeroUsize::new(512).expect("above 0");

    /// Returns the block size for rows of `length` tokens, or `None` if the scores are materialised.
    pub fn block(self, length: usize) -> Option<usize> {
        match self {
            Self::Auto => Some(Self::BLOCK.get()).filter(|block| length > *block),
            Self::Materialised => None,
            Self::Blockwise { block } => Some(block.get()),
        }
    }
}
