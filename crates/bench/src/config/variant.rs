//! One way to solve the problem of a benchmark, as a configuration says it.

#[cfg(doc)]
use backend_cpu::most_threads;
use backend_tpu::program::{Numerics, ProgramKind};
use grpo_core::{Dtype, GradientSpec, Implementation, Tiling};
use serde::{Deserialize, Serialize};

/// One way to solve the problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VariantConfig {
    /// Instead of the configuration's.
    pub backend: Option<String>,
    /// Instead of the problem's.
    pub dtype: Option<Dtype>,
    /// Threads on the CPU; 0 is one per core, and [`most_threads`] are the most.
    pub threads: usize,
    /// The instruction set of this CPU whose kernels are used: `portable`, `avx2`, ...; none: the fastest that there
    /// is.
    pub isa: Option<String>,
    /// What dL/dlogits is rounded to on the CPU before it is multiplied into gradients; none: the dtype of the inputs.
    pub dlogits: Option<Dtype>,
    /// Whether to measure where the time of its steps goes, on the CPU: products, packing, statistics, gradients, and the rest, which
    /// is waiting. The clock costs little, and not nothing: compare times of variants without it.
    pub profile: bool,
    /// Whether the variant's process takes large allocations in huge pages (glibc's `malloc.hugetlb`).
    pub huge_pages: bool,
    /// Somebody else's program, with its arguments, that speaks the protocol of [`crate::protocol`].
    pub command: Option<Vec<String>>,
    /// The implementation that computes the loss.
    pub implementation: Implementation,
    /// Scores, gradients, gradients in place of the given logits, or the baseline that automatic differentiation makes.
    pub pass: ProgramKind,
    /// Gradients to make; without `lm_head` the head is frozen. For given logits, `hidden` means their gradient.
    pub gradients: GradientSpec,
    /// What is rounded, and whether the entropy is computed.
    pub numerics: Numerics,
    /// Sizes of tiles, and the budget of workspace that they are chosen within.
    pub tiling: Tiling,
    /// Blocks of our TPU kernels for given logits, which replace XLA's own code where this is given.
    pub mosaic: Option<MosaicConfig>,
}

/// Blocks of the TPU kernels, multiples of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicConfig {
    /// Tokens of a block.
    pub time_block: usize,
    /// Vocabulary entries of a block.
    pub vocab_block: usize,
}

impl Default for MosaicConfig {
    fn default() -> Self {
        Self { time_block: 256, vocab_block: 2048 }
    }
}
