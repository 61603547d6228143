//! The roundings of a program, and the blocks of its kernels.

use grpo_core::Dtype;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The tensors that may be rounded to the inputs' dtype, and the optional results.
///
/// ```
/// use grpo_backend_tpu::program::Numerics;
/// use grpo_core::Dtype;
///
/// // Logits and their gradient in bf16, no entropy: the fastest setting that usually still learns.
/// let numerics = Numerics { logits: Dtype::Bf16, dlogits: Dtype::Bf16, entropy: false, ..Numerics::default() };
/// assert_eq!(numerics.gradients, Dtype::F32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Numerics {
    /// The dtype of stored logits. `bf16` rounds them once, before all statistics, equally in the forward and backward
    /// pass.
    pub logits: Dtype,
    /// The dtype of dL/dlogits as an operand of the gradients' products, which accumulate in f32.
    pub dlogits: Dtype,
    /// The dtype of gradient accumulators. Products accumulate in f32; `bf16` rounds the accumulator after every chunk
    /// or micro-batch.
    pub gradients: Dtype,
    /// `true` to compile scoring and loss so that both see bit-identical logits, which makes the ratio exactly 1 on
    /// policy. Otherwise the compiler may fuse statistics into the product differently in each program.
    pub exact_ratio: bool,
    /// `true` to compute the entropy. Otherwise its result is zeros, and there is no entropy bonus.
    pub entropy: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        let f32 = Dtype::F32;
        Self { logits: f32, dlogits: f32, gradients: f32, exact_ratio: true, entropy: true }
    }
}

/// The blocks of the TPU kernels of `logits`. See [`crate::mosaic::KernelSpec`].
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicBlocks {
    /// The number of batches into which tokens are divided: a kernel sees logits as `[batch, N / batch, V]`.
    #[default(1)]
    pub batch: usize,
    /// The tokens of a block, a multiple of 128.
    #[default(256)]
    pub time_block: usize,
    /// The vocabulary entries of a block, a multiple of 128.
    #[default(2048)]
    pub vocab_block: usize,
}
