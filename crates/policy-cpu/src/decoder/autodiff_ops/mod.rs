//! The decoder's operations as differentiable burn operations, on kernels of [`grpo_backend_cpu::layers`].
//!
//! All tensors are f32 rows `[N, ..]`. Operands of the forward pass are saved for the backward pass; storage is shared, not copied.

mod attention;
mod gates;
mod linear;
mod norms;
mod residual;
mod second;

pub(crate) use attention::{Sequences, attention, gated_delta_net};
pub(crate) use gates::{gated_values, sigmoid, split_gates, without_gates};
pub(crate) use linear::{Addend, adapted_head, embedding, linear, low_rank};
pub(crate) use norms::{gated, norm_heads, rms_norm};
pub(crate) use residual::{add_scaled, scaled, select_rows};
pub(crate) use second::fork;

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Graph, Operand, values};
use grpo_policy::{Error, Result};

/// Returns the row-major storage of a tensor, and joins its autodiff graph to `graph`.
pub(super) fn operand<const D: usize>(graph: &mut Graph, name: &'static str, tensor: Tensor<D>) -> Result<Operand> {
    *graph = graph.join(name, &tensor).map_err(Error::other)?;
    Ok(Operand::new(name, tensor).map_err(Error::other)?.row_major())
}

/// Returns the elements of an operand.
pub(super) fn read<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<&'a [f32]> {
    values(name, tensor).map_err(Error::other)
}

/// Returns the elements of a saved operand.
pub(super) fn reread(tensor: &FlexTensor) -> &[f32] {
    values("a tensor of the forward pass", tensor).expect("row-major f32, as in the forward pass")
}

/// Returns the result of a kernel whose shapes were checked in the forward pass.
pub(super) fn fitting<T>(result: grpo_core::Result<T>) -> T {
    result.expect("shapes of the forward pass")
}
