//! Tensors on the devices of a plan.

use crate::devices::Devices;
use crate::error::{NAME, failed};
use crate::program::Role;
use crate::shard::Layout;
use grpo_core::error::{Error, Result};
use grpo_core::{DeviceTensor, Dtype, TensorRef};
use half::bf16;
use pjrt::Buffer;
use std::any::Any;

/// A tensor of a plan on its devices: hidden states, head, logits or gradients.
///
/// [`crate::PjrtPlan::upload`] and [`crate::PjrtPlan::zeros`] make it for a role and a number of tokens; all calls of
/// plans of the same shapes accept it. Gradients are updated in place.
pub struct PjrtTensor {
    pub(crate) role: Role,
    pub(crate) dtype: Dtype,
    pub(crate) layout: Layout,
    /// One per device; empty after a failed call that owned them.
    pub(crate) parts: Vec<Buffer>,
}

impl std::fmt::Debug for PjrtTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { role, dtype, parts, .. } = self;
        write!(f, "PjrtTensor({}, {}, {} devices)", role.name(), dtype.name(), parts.len())
    }
}

impl DeviceTensor for PjrtTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl PjrtTensor {
    /// Returns the role of the tensor in a program.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the number of elements, without padding.
    pub fn elements(&self) -> usize {
        self.layout.elements()
    }

    /// Blocks until the elements are available.
    ///
    /// # Errors
    /// As [`PjrtTensor::to_host`].
    pub fn wait(&self) -> Result<()> {
        self.alive()?;
        self.parts.iter().try_for_each(Buffer::wait).map_err(failed)
    }

    /// Returns the elements, row-major and widened to f32.
    ///
    /// # Errors
    /// [`Error::Backend`] if the program that computes or updates it failed.
    pub fn to_host(&self) -> Result<Vec<f32>> {
        match self.dtype {
            Dtype::F32 => {
                let mut values = vec![0.0; self.elements()];
                self.read(&mut values)?;
                Ok(values)
            }
            Dtype::Bf16 => {
                let mut values = vec![bf16::ZERO; self.elements()];
                self.read(&mut values)?;
                Ok(values.into_iter().map(f32::from).collect())
            }
        }
    }

    /// Copies the tensor into `to`.
    pub(crate) fn read<T: pjrt::Element + Copy + Default>(&self, to: &mut [T]) -> Result<()> {
        self.alive()?;
        self.layout.collect(to, |device, part| self.parts[device].to_host(part)).map_err(failed)
    }

    /// # Errors
    /// [`Error::Backend`] if a failed call has lost the tensor.
    pub(crate) fn alive(&self) -> Result<()> {
        if self.parts.is_empty() {
            let message = format!("the tensor `{}` was lost in a call that failed; upload it again", self.role.name());
            return Err(Error::Backend { backend: NAME.into(), message });
        }
        Ok(())
    }

    /// Copies `from` to the devices.
    pub(crate) fn upload(
        devices: &Devices,
        role: Role,
        layout: Layout,
        shape: &[usize],
        from: TensorRef<'_>,
    ) -> Result<Self> {
        let parts = match from {
            TensorRef::F32(values) => send(devices, &layout, shape, values)?,
            TensorRef::Bf16(values) => send(devices, &layout, shape, values)?,
            TensorRef::Device(_) => {
                return Err(Error::shape("upload", role.name(), "a tensor on the host", "one on a device"));
            }
        };
        Ok(Self { role, dtype: from.dtype(), layout, parts })
    }
}

/// Copies every device's shard of `values` to it.
pub(crate) fn send<T: pjrt::Element + Copy + Default>(
    devices: &Devices,
    layout: &Layout,
    shape: &[usize],
    values: &[T],
) -> Result<Vec<Buffer>> {
    let send = |(index, device)| devices.client.buffer_from_host(&layout.part(values, index), shape, device);
    devices.list.iter().enumerate().map(send).collect::<pjrt::Result<_>>().map_err(failed)
}
