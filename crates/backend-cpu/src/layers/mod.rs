//! The operations of a decoder's layers on host slices, forward and backward: linear layers, RMSNorm, SwiGLU and GeGLU, rotary
//! position embeddings, grouped-query attention over packed sequences, and mixtures of experts.
//!
//! A trainer's automatic differentiation chains them; each backward function takes dL/d(output) and returns the
//! gradients of the inputs. Products use the packed kernels of the loss; other operations make one pass per row.
//!
//! This saves library calls for exponentials, memory passes for elementary operations, copies that only permute axes,
//! padding, and `[T, T]` scores for more than one tile of queries.
//!
//! ```
//! use grpo_backend_cpu::layers::{Add, Layers};
//!
//! let layers = Layers::new();
//! let (x, weight) = ([1.0, 2.0], [3.0, 4.0, 5.0, 6.0]); // [1, 2] and [2, 2]
//! assert_eq!(layers.linear(&x, &weight, Add::Rows(&[0.5, 0.5]), [1, 2, 2])?, [13.5, 16.5]);
//! # Ok::<(), grpo_core::Error>(())
//! ```
//!
//! Legend: N tokens (rows), H hidden size, I width of the MLP, A query heads, K key/value heads, R = A / K, D head
//! width. All tensors are row-major f32. Results depend on the instruction set and on [`Layers::with_products`], but not on the number of
//! threads.

mod attention;
mod cache;
mod experts;
mod gated;
mod gated_delta;
mod linear;
mod product;
mod quantized;
mod rms_norm;
mod rope;
mod scratch;
mod stored;

pub use attention::{AttentionGrad, Heads, Mixed, Scores, Span};
pub use cache::KvCache;
pub use experts::{ExpertAdapter, ExpertAdapterGrad, ExpertGroups, ExpertMatrix, ExpertWeights, ExpertsGrad, Routing};
pub use gated::Activation;
pub use gated_delta::{DeltaGrad, DeltaHeads, DeltaState, DeltaWeights};
pub use linear::{Add, PackedWeight};
pub use quantized::Quantized;
pub use rms_norm::{HeadNorms, HeadNormsGrad};
pub use rope::RopeTable;
pub use stored::StoredWeight;

use crate::arch::{Isa, IsaToken};
use crate::gemm::Gemm;
use grpo_core::Dtype;
use grpo_core::error::{Error, Result};

/// The layer kernels of one instruction set. See the [module](self) for an example.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    /// The products of attention, and the instruction set of all operations.
    gemm: Gemm,
    /// The products of linear layers.
    linear: Gemm,
}

impl Layers {
    /// Selects kernels of the fastest instruction set of this processor.
    pub fn new() -> Self {
        Self::of(IsaToken::detect())
    }

    /// Selects kernels of `isa`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this processor lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self::of(isa.checked()?))
    }

    fn of(isa: IsaToken) -> Self {
        let gemm = Gemm::new(isa, false);
        Self { gemm, linear: gemm }
    }

    /// Sets the dtype of the operands of linear layers' products, forward and backward; f32 by default. With bf16, f32 operands are rounded to
    /// the nearest bf16 value when a product packs them, and sums are f32. The processor multiplies bf16 pairs or tiles if that is faster than
    /// f32, and otherwise the same values in f32. All other operations are f32.
    ///
    /// ```
    /// use grpo_backend_cpu::layers::{Add, Layers};
    /// use grpo_core::Dtype;
    ///
    /// let layers = Layers::new().with_products(Dtype::Bf16);
    /// // 1.003 is 1 in bf16.
    /// assert_eq!(layers.linear(&[1.003], &[3.0], Add::Rows(&[0.003]), [1, 1, 1])?, [3.003]);
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_products(self, dtype: Dtype) -> Self {
        let linear = if dtype == Dtype::Bf16 { Gemm::rounding(self.gemm.isa()) } else { self.gemm };
        Self { linear, ..self }
    }

    /// Returns `true` if operands of linear layers' products are rounded to bf16.
    pub fn rounds_operands(&self) -> bool {
        self.linear.rounds()
    }

    /// Estimates the bytes that a [`PackedWeight`] `[in, out]` takes. `are_bf16` is `true` if all values are bf16 values; with
    /// [`Layers::with_products`] of bf16 they always are, because they are rounded.
    ///
    /// The estimate is an upper bound. For bf16 values with AVX-512 it is 13 bits each, which holds for weights of nearly normal distribution
    /// (12.3 bits); a weight with many exponents outside 15 consecutive ones takes 16 bits per value and exceeds the estimate.
    pub fn packed_bytes(&self, [input, output]: [usize; 2], are_bf16: bool) -> usize {
        let words = self.linear.rhs_words(output, input);
        match self.is_large([input, output]) && (are_bf16 || self.linear.rounds()) {
            true if self.linear.codes(input) => self.linear.coded_bytes(words),
            true if self.linear.packs_f32() => words.saturating_mul(size_of::<u16>()),
            _ => words.saturating_mul(size_of::<u32>()),
        }
    }

    /// Returns `true` if a weight of this size is packed in less memory where it has bf16 values.
    fn is_large(&self, [input, output]: [usize; 2]) -> bool {
        Self::packs_narrow(input.saturating_mul(output))
    }
}

impl Default for Layers {
    fn default() -> Self {
        Self::new()
    }
}

/// The rows per task, for operations that make one pass per row.
const ROWS: usize = 64;

/// Checks that a slice has the length of the dimensions.
fn fits(operation: &'static str, what: &str, found: usize, dims: &[usize]) -> Result<()> {
    let expected = dims.iter().try_fold(1_usize, |product, d| product.checked_mul(*d));
    if expected == Some(found) {
        return Ok(());
    }
    Err(Error::shape(operation, what, format!("{dims:?}"), format!("{found} values")))
}

#[cfg(test)]
mod tests;
