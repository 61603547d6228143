//! The operations of a decoder's layers on host slices, forward and backward: linear layers, RMSNorm, SwiGLU, rotary positions and
//! grouped-query attention over sequences laid end to end.
//!
//! A trainer's automatic differentiation chains them; each backward function takes dL/d(output) and gives the gradients of the
//! inputs. Products run on the packed kernels of the loss, everything else in one pass per row.
//!
//! Avoids a library call per exponential, passes over memory per elementary operation, copies that only move axes, padding, and
//! `[T, T]` scores that outlive a tile of queries.
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
//! Legend: N tokens (rows), H hidden size, I width of the MLP, A query heads, K key/value heads, R = A / K, D head width. All
//! tensors are row-major f32. Results depend on the instruction set, not on the number of threads.

mod attention;
mod cache;
mod linear;
mod product;
mod rms_norm;
mod rope;
mod scratch;
mod stored;
mod swiglu;

pub use attention::{AttentionGrad, Heads, Mixed, Span};
pub use cache::KvCache;
pub use linear::{Add, PackedWeight};
pub use rms_norm::{HeadNorms, HeadNormsGrad};
pub use rope::RopeTable;
pub use stored::StoredWeight;

use crate::arch::{Isa, IsaToken};
use crate::gemm::Gemm;
use grpo_core::error::{Error, Result};

/// The kernels of one instruction set. See the [module](self) for an example.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    gemm: Gemm,
}

impl Layers {
    /// Kernels of the fastest instruction set that this processor has.
    pub fn new() -> Self {
        Self { gemm: Gemm::new(IsaToken::detect(), false) }
    }

    /// Kernels of `isa`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when this processor lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self { gemm: Gemm::new(isa.checked()?, false) })
    }
}

impl Default for Layers {
    fn default() -> Self {
        Self::new()
    }
}

/// Rows that one task works on where a row is one pass.
const ROWS: usize = 64;

/// Whether a slice has the length that the dimensions ask for.
fn fits(operation: &'static str, what: &str, found: usize, dims: &[usize]) -> Result<()> {
    let expected = dims.iter().try_fold(1_usize, |product, d| product.checked_mul(*d));
    if expected == Some(found) {
        return Ok(());
    }
    Err(Error::shape(operation, what, format!("{dims:?}"), format!("{found} values")))
}

#[cfg(test)]
mod tests;
