//! What a program rounds, and how its kernels are cut.

use grpo_core::Dtype;
use serde::{Deserialize, Serialize};

/// What may be rounded to the dtype of the inputs, and what is made at all.
///
/// ```
/// use backend_tpu::program::Numerics;
/// use grpo_core::Dtype;
///
/// // Logits and their gradient in bf16, no entropy: the fastest that learning usually bears.
/// let numerics = Numerics { logits: Dtype::Bf16, dlogits: Dtype::Bf16, entropy: false, ..Numerics::default() };
/// assert_eq!(numerics.gradients, Dtype::F32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// What logits are held in. `bf16` rounds them once, before every statistic, in forward and backward alike.
    pub logits: Dtype,
    /// What dL/dlogits is rounded to before it is multiplied into gradients (sums are f32 anyway).
    pub dlogits: Dtype,
    /// What gradients are accumulated in. Sums of a product are f32 anyway; `bf16` rounds the running sum with every
    /// chunk or micro-batch.
    pub gradients: Dtype,
    /// Whether scoring and loss are compiled so that they see bit for bit the same logits, which makes a ratio exactly 1
    /// on policy. Without it the compiler may fuse statistics into the product, differently in each program.
    pub exact_ratio: bool,
    /// Whether the entropy is computed. Without it the result holds zeros, and there is no entropy bonus.
    pub entropy: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        let f32 = Dtype::F32;
        Self { logits: f32, dlogits: f32, gradients: f32, exact_ratio: true, entropy: true }
    }
}

/// How the TPU kernels of `logits` are cut. See [`crate::mosaic::KernelSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicBlocks {
    /// Batches into which the tokens are divided: logits are `[batch, N / batch, V]` to a kernel.
    pub batch: usize,
    /// Tokens of a block, a multiple of 128.
    pub time_block: usize,
    /// Vocabulary entries of a block, a multiple of 128.
    pub vocab_block: usize,
}

impl Default for MosaicBlocks {
    fn default() -> Self {
        Self { batch: 1, time_block: 256, vocab_block: 2048 }
    }
}
