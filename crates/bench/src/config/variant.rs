//! The configuration of one variant.

use crate::comparison;
#[cfg(doc)]
use grpo_backend_cpu::most_threads;
use grpo_backend_tpu::program::{Numerics, Pass, Program, Spec};
use grpo_core::{Dtype, GradientSpec, Implementation, PolicySpec, Tiling};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// One way to solve the problem of a benchmark.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VariantConfig {
    /// Backend; default the configuration's.
    pub backend: Option<String>,
    /// Dtype; default the problem's.
    pub dtype: Option<Dtype>,
    /// Threads on the CPU; 0 is one per core, the maximum is [`most_threads`].
    pub threads: usize,
    /// The CPU's instruction set whose kernels are used: `portable`, `avx2`, ...; default the fastest available.
    pub isa: Option<String>,
    /// The dtype to which dL/dlogits is rounded on the CPU before it is multiplied into gradients; default the dtype of the inputs.
    pub dlogits: Option<Dtype>,
    /// `true` to measure the time per kind of work on the CPU: products, packing, statistics, gradients, and waiting, which is the rest.
    /// The clock adds a small cost: do not compare step times with variants without it.
    pub profile: bool,
    /// `true` to allocate large buffers of the variant's process in huge pages (glibc's `malloc.hugetlb`).
    pub huge_pages: bool,
    /// Another program, with its arguments, that implements the protocol of [`crate::protocol`].
    pub command: Option<Vec<String>>,
    /// The implementation that computes the loss.
    pub implementation: Implementation,
    /// The pass: scores, gradients, gradients in place of precomputed logits, or the baseline of automatic differentiation.
    pub pass: ProgramKind,
    /// Gradients to compute; without `lm_head` the head is frozen. For precomputed logits, `hidden` is their gradient.
    pub gradients: GradientSpec,
    /// Rounding options, and whether the entropy is computed.
    pub numerics: Numerics,
    /// Tile sizes and the workspace budget.
    pub tiling: Tiling,
    /// Blocks of this project's TPU kernels for precomputed logits, which replace XLA's code if set.
    pub mosaic: Option<MosaicConfig>,
}

/// A program that benchmarks run or compile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramKind {
    /// Log-probabilities and entropies.
    Score,
    /// The loss and gradients.
    #[default]
    Gradient,
    /// The loss, and dL/dlogits in place of the precomputed logits.
    GradientInPlace,
    /// The dense loss as automatic differentiation writes it, for any implementation.
    Materialised,
    /// Only the products of loss and gradients; for precomputed logits, one pass over them, in place.
    Bare,
}

impl ProgramKind {
    /// Returns the pass whose results the program has.
    pub fn pass(self, policy: PolicySpec) -> Pass {
        match (self, policy) {
            (Self::Score, _) => Pass::Score,
            (Self::GradientInPlace, _) | (Self::Bare, PolicySpec::Logits { .. }) => Pass::GradientInPlace,
            (Self::Gradient | Self::Materialised | Self::Bare, _) => Pass::Gradient,
        }
    }

    /// Returns the function that builds the program of a pass.
    pub(crate) fn build(self) -> fn(&Spec, Pass) -> grpo_core::Result<Program> {
        match self {
            Self::Score | Self::Gradient | Self::GradientInPlace => Spec::program,
            Self::Materialised => comparison::materialised,
            Self::Bare => comparison::bare_products,
        }
    }
}

/// Blocks of the TPU kernels, multiples of 128.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MosaicConfig {
    /// Tokens per block.
    #[default(256)]
    pub time_block: usize,
    /// Vocabulary entries per block.
    #[default(2048)]
    pub vocab_block: usize,
}
