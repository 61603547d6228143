//! What crosses the seam, once it is known to lie on the host.

use crate::error::unsupported;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, PolicyInput, PolicyOutput, TensorMut, TensorRef};
use std::convert::Infallible;

/// A tensor to read. Match it by value: the compiler then knows that there is no third case.
pub(crate) type Slice<'a> = TensorRef<'a, Infallible>;

/// A tensor to overwrite.
pub(crate) type SliceMut<'a> = TensorMut<'a, Infallible>;

/// Gradients on the host, to be added to.
pub(crate) type Grads<'a> = grpo_core::Grads<&'a mut [f32]>;

pub(crate) fn on_device() -> Error {
    unsupported("tensors on a device", "copy them to host slices first")
}

/// A policy's output on the host.
///
/// # Errors
/// [`Error::Unsupported`] for tensors on a device.
pub(crate) fn policy(policy: PolicyInput<'_>) -> Result<PolicyOutput<Slice<'_>>> {
    policy.try_map(|tensor| tensor.on_host().ok_or_else(on_device))
}

/// Logits to overwrite, on the host.
///
/// # Errors
/// [`Error::Unsupported`] for tensors on a device.
pub(crate) fn in_place(logits: TensorMut<'_>) -> Result<SliceMut<'_>> {
    logits.on_host().ok_or_else(on_device)
}

/// Buffers for gradients on the host.
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
