//! What crosses the seam, once it is known to lie on the host.

use crate::plan::unsupported;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, PolicyInput, PolicyOutput, TensorMut, TensorRef};
use std::convert::Infallible;

/// A tensor to read.
pub(crate) type Slice<'a> = TensorRef<'a, Infallible>;

/// A tensor to overwrite.
pub(crate) type SliceMut<'a> = TensorMut<'a, Infallible>;

/// [`GradsMut`] on the host.
#[derive(Debug)]
pub(crate) struct Grads<'a> {
    pub(crate) hidden: Option<&'a mut [f32]>,
    pub(crate) lm_head: Option<&'a mut [f32]>,
    pub(crate) bias: Option<&'a mut [f32]>,
    pub(crate) logits: Option<&'a mut [f32]>,
}

fn on_device() -> Error {
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

impl<'a> Grads<'a> {
    /// # Errors
    /// [`Error::Unsupported`] for tensors on a device, [`Error::Shape`] for a dtype other than f32.
    pub(crate) fn new(grads: GradsMut<'a>) -> Result<Self> {
        let write = |tensor: Option<TensorMut<'a>>| match tensor {
            None => Ok(None),
            Some(TensorMut::F32(t)) => Ok(Some(t)),
            Some(TensorMut::Bf16(_)) => Err(Error::shape("loss call", "dtype of a gradient", "f32", "bf16")),
            Some(TensorMut::Device(_)) => Err(on_device()),
        };
        Ok(Self {
            hidden: write(grads.hidden)?,
            lm_head: write(grads.lm_head)?,
            bias: write(grads.bias)?,
            logits: write(grads.logits)?,
        })
    }
}
