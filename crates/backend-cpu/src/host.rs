//! Tensors of the backend interface, once they are known to be on the host.

use crate::error::unsupported;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, PolicyInput, PolicyOutput, TensorMut, TensorRef};
use std::convert::Infallible;

/// A tensor to read. Match it by value, so that the compiler knows that there is no device variant.
pub(crate) type Slice<'a> = TensorRef<'a, Infallible>;

/// A tensor to overwrite.
pub(crate) type SliceMut<'a> = TensorMut<'a, Infallible>;

/// Gradient accumulators on the host.
pub(crate) type Grads<'a> = grpo_core::Grads<&'a mut [f32]>;

pub(crate) fn on_device() -> Error {
    unsupported("tensors on a device", "copy them to host slices first")
}

/// Returns a policy's output on the host.
///
/// # Errors
/// [`Error::Unsupported`] for tensors on a device.
pub(crate) fn policy(policy: PolicyInput<'_>) -> Result<PolicyOutput<Slice<'_>>> {
    policy.try_map(|tensor| tensor.on_host().ok_or_else(on_device))
}

/// Returns logits to overwrite, on the host.
///
/// # Errors
/// [`Error::Unsupported`] for tensors on a device.
pub(crate) fn in_place(logits: TensorMut<'_>) -> Result<SliceMut<'_>> {
    logits.on_host().ok_or_else(on_device)
}

/// Returns gradient accumulators on the host.
///
/// # Errors
/// [`Error::Unsupported`] for tensors on a device, [`Error::Shape`] for a dtype other than f32.
pub(crate) fn grads(grads: GradsMut<'_>) -> Result<Grads<'_>> {
    grads.try_map(|tensor| match tensor {
        TensorMut::F32(t) => Ok(t),
        TensorMut::Bf16(_) => Err(Error::shape("loss call", "dtype of a gradient", "f32", "bf16")),
        TensorMut::Device(_) => Err(on_device()),
    })
}
