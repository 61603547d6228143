//! Tensors of the loss on the devices of a plan.

use crate::devices::{self, Devices, Layout};
use crate::error::NAME;
use crate::padding::Padding;
use crate::program::{Role, Spec};
use grpo_core::error::{Error, Result};
use grpo_core::{DeviceTensor, Dtype, TensorRef};
use half::bf16;
use std::any::Any;

/// A tensor of a plan on its devices: hidden states, head, logits or gradients.
///
/// [`crate::PjrtPlan::upload`] and [`crate::PjrtPlan::zeros`] make it for a role and a number of tokens; all calls of
/// plans of the same shapes accept it. Gradients are updated in place.
pub struct PjrtTensor {
    pub(crate) role: Role,
    pub(crate) dtype: Dtype,
    pub(crate) padding: Padding,
    /// `None` after a failed call that owned it.
    pub(crate) tensor: Option<devices::DeviceTensor>,
}

impl std::fmt::Debug for PjrtTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { role, dtype, tensor, .. } = self;
        let devices = tensor.as_ref().map_or(0, |tensor| tensor.shards().len());
        write!(f, "PjrtTensor({}, {}, {devices} devices)", role.name(), dtype.name())
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
        self.padding.elements()
    }

    /// Blocks until the elements are available.
    ///
    /// # Errors
    /// As [`PjrtTensor::to_host`].
    pub fn wait(&self) -> Result<()> {
        Ok(self.alive()?.wait(self.role.name())?)
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
    pub(crate) fn read<T: grpo_pjrt::Element + Copy + Default>(&self, to: &mut [T]) -> Result<()> {
        let padded = self.alive()?.read::<T>(self.role.name())?;
        match self.padding.is_none() {
            true => to.copy_from_slice(&padded),
            false => self.padding.crop(&padded, to),
        }
        Ok(())
    }

    /// Returns the tensor on the devices.
    ///
    /// # Errors
    /// [`Error::Backend`] if a failed call has lost the tensor.
    pub(crate) fn alive(&self) -> Result<&devices::DeviceTensor> {
        self.tensor.as_ref().ok_or_else(|| {
            let message = format!("the tensor `{}` was lost in a call that failed; upload it again", self.role.name());
            Error::Backend { backend: NAME.into(), message }
        })
    }

    /// Copies `from`, for a batch of `tokens`, to the devices.
    pub(crate) fn upload(
        devices: &Devices,
        spec: &Spec,
        role: Role,
        tokens: usize,
        from: TensorRef<'_>,
    ) -> Result<Self> {
        let (padding, layout) = (Padding::new(spec, role, tokens), layout(spec, role));
        let tensor = match from {
            TensorRef::F32(values) => devices.upload(&padding.pad(values), layout)?,
            TensorRef::Bf16(values) => devices.upload(&padding.pad(values), layout)?,
            TensorRef::Device(_) => {
                return Err(Error::shape("upload", role.name(), "a tensor on the host", "one on a device"));
            }
        };
        Ok(Self { role, dtype: from.dtype(), padding, tensor: Some(tensor) })
    }
}

/// Returns the layout of an argument or a result of the programs of `spec`.
pub(crate) fn layout(spec: &Spec, role: Role) -> Layout {
    Layout::new(&spec.type_of(role).shape, spec.sharding(role).as_ref())
}
