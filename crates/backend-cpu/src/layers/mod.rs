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
//! use backend_cpu::layers::{Add, Layers};
//!
//! let layers = Layers::new();
//! let (x, weight) = ([1.0, 2.0], [3.0, 4.0, 5.0, 6.0]); // [1, 2] and [2, 2]
//! assert_eq!(layers.linear(&x, &weight, Add::Rows(&[0.5, 0.5]), [1, 2, 2])?, [13.5, 16.5]);
//! # Ok::<(), grpo_core::Error>(())
//! ```
//!
//! Legend: N tokens (rows), H hidden size, I width of the MLP, A query heads, K key/value heads, R = A / K, D head
//! width. All tensors are row-major f32. Results depend on the instruction set, but not on the number of threads.

mod attention;
mod cache;
mod experts;
mod gated;
mod gated_delta;
mod linear;
mod product;
mod rms_norm;
mod rope;
mod scratch;
mod stored;

pub use attention::{AttentionGrad, Heads, Mixed, Scores, Span};
pub use cache::KvCache;
pub use experts::{ExpertMatrix, ExpertWeights, ExpertsGrad, Routing};
pub use gated::Activation;
pub use gated_delta::{DeltaGrad, DeltaHeads, DeltaState, DeltaWeights};
pub use linear::{Add, PackedWeight};
pub use rms_norm::{HeadNorms, HeadNormsGrad};
pub use rope::RopeTable;
pub use stored::StoredWeight;

use crate::arch::{Isa, IsaToken};
use crate::gemm::Gemm;
use grpo_core::error::{Error, Result};

/// The layer kernels of one instruction set. See the [module](self) for an example.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    gemm: Gemm,
}

impl Layers {
    /// Selects kernels of the fastest instruction set of this processor.
    pub fn new() -> Self {
        Self { gemm: Gemm::new(IsaToken::detect(), false) }
    }

    /// Selects kernels of `isa`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this processor lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self { gemm: Gemm::new(isa.checked()?, false) })
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
