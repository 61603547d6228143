//! Tensors of a call, once they are known to be on the host.

use crate::error::unsupported;
use crate::pages::advise_huge_pages;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, PolicyInput, PolicyOutput, TensorMut, TensorRef};
use std::convert::Infallible;

/// A tensor to read. Match it by value, so that the compiler knows that there is no device variant.
pub(crate) type Slice<'a> = TensorRef<'a, Infallible>;

/// A tensor to overwrite.
pub(crate) type SliceMut<'a> = TensorMut<'a, Infallible>;

/// Gradient accumulators on the host.
pub(crate) type Grads<'a> = grpo_core::Grads<&'a mut [f32]>;

/// The tensors of a call.
pub(crate) enum Tensors<'a> {
    /// The policy's output, and the accumulators to which its gradients are added; none for scores.
    Separate(PolicyOutput<Slice<'a>>, Grads<'a>),
    /// Logits that are overwritten with their gradient. Only for plans of precomputed logits.
    InPlace(SliceMut<'a>),
}

impl<'a> Tensors<'a> {
    /// # Errors
    /// [`Error::Unsupported`] for tensors on a device, [`Error::Shape`] for a gradient of a dtype other than f32.
    pub(crate) fn new(policy: PolicyInput<'a>, grads: GradsMut<'a>) -> Result<Self> {
        let policy = policy.try_map(|tensor| tensor.on_host().ok_or_else(on_device))?;
        let grads = grads.try_map(|tensor| match tensor {
            TensorMut::F32(t) => {
                // Kernels read an accumulator before they write it. A new buffer then faults twice per page, and the second fault flushes
                // the TLB of all threads: a quarter to a third of a step with pages of 4 KiB (docs/notes/cpu-kernels.md).
                advise_huge_pages(t);
                Ok(t)
            }
            TensorMut::Bf16(_) => Err(Error::shape("loss call", "dtype of a gradient", "f32", "bf16")),
            TensorMut::Device(_) => Err(on_device()),
        })?;
        Ok(Self::Separate(policy, grads))
    }

    /// # Errors
    /// [`Error::Unsupported`] for a tensor on a device.
    pub(crate) fn in_place(logits: TensorMut<'a>) -> Result<Self> {
        logits.on_host().map(Self::InPlace).ok_or_else(on_device)
    }

    /// Returns the policy's output.
    pub(crate) fn policy(&self) -> PolicyOutput<Slice<'_>> {
        match self {
            Self::Separate(policy, _) => *policy,
            Self::InPlace(SliceMut::F32(logits)) => PolicyOutput::Logits(Slice::F32(logits)),
            Self::InPlace(SliceMut::Bf16(logits)) => PolicyOutput::Logits(Slice::Bf16(logits)),
            Self::InPlace(SliceMut::Device(none)) => match *none {},
        }
    }
}

pub(crate) fn on_device() -> Error {
    unsupported("tensors on a device", "copy them to host slices first")
}
