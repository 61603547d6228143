//! What crosses the seam, once it is known to lie on the host.

use crate::error::unsupported;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, PolicyInput, TensorMut, TensorRef};
use half::bf16;

/// A tensor to read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Slice<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// A tensor to overwrite.
#[derive(Debug)]
pub(crate) enum SliceMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

/// [`PolicyInput`] on the host.
#[derive(Debug)]
pub(crate) enum Policy<'a> {
    Logits(Slice<'a>),
    LogitsInPlace(SliceMut<'a>),
    Hidden { hidden: Slice<'a>, lm_head: Slice<'a>, bias: Option<Slice<'a>> },
}

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

fn read(tensor: TensorRef<'_>) -> Result<Slice<'_>> {
    match tensor {
        TensorRef::F32(t) => Ok(Slice::F32(t)),
        TensorRef::Bf16(t) => Ok(Slice::Bf16(t)),
        TensorRef::Device(_) => Err(on_device()),
    }
}

impl<'a> Policy<'a> {
    /// # Errors
    /// [`Error::Unsupported`] for tensors on a device.
    pub(crate) fn new(policy: PolicyInput<'a>) -> Result<Self> {
        Ok(match policy {
            PolicyInput::Logits(logits) => Self::Logits(read(logits)?),
            PolicyInput::LogitsInPlace(TensorMut::F32(logits)) => Self::LogitsInPlace(SliceMut::F32(logits)),
            PolicyInput::LogitsInPlace(TensorMut::Bf16(logits)) => Self::LogitsInPlace(SliceMut::Bf16(logits)),
            PolicyInput::LogitsInPlace(TensorMut::Device(_)) => return Err(on_device()),
            PolicyInput::Hidden { hidden, lm_head, bias } => {
                Self::Hidden { hidden: read(hidden)?, lm_head: read(lm_head)?, bias: bias.map(read).transpose()? }
            }
        })
    }
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
