//! The caller's tensors: inputs and accumulators, on the host or on devices.

use crate::devices::Devices;
use crate::error::{failed, unsupported};
use crate::program::Role;
use crate::shard::Layout;
use crate::tensor::PjrtTensor;
use grpo_core::error::{Error, Result};
use grpo_core::{DeviceTensor, Dtype, GradsMut, PolicyInput, TensorMut, TensorRef};
use pjrt::Buffer;
use std::collections::HashMap;

/// A tensor of the caller.
pub(crate) enum Operand<'a> {
    ReadHost(TensorRef<'a>),
    ReadDevice(&'a PjrtTensor),
    UpdateHost(TensorMut<'a>),
    UpdateDevice(&'a mut PjrtTensor),
}

/// The caller's tensors, by role.
#[derive(Default)]
pub(crate) struct Operands<'a>(Vec<(Role, Operand<'a>)>);

impl<'a> Operands<'a> {
    /// Collects the policy's inputs.
    pub(crate) fn new(policy: PolicyInput<'a>) -> Result<Self> {
        let mut operands = Self::default();
        match policy {
            PolicyInput::Logits(logits) => operands.read(Role::Logits, logits)?,
            PolicyInput::Hidden { hidden, lm_head, bias } => {
                operands.read(Role::Hidden, hidden)?;
                operands.read(Role::LmHead, lm_head)?;
                if let Some(bias) = bias {
                    operands.read(Role::Bias, bias)?;
                }
            }
        }
        Ok(operands)
    }

    /// Collects logits that are overwritten with their gradient.
    pub(crate) fn in_place(logits: TensorMut<'a>) -> Result<Self> {
        let mut operands = Self::default();
        operands.update(Role::Logits, logits)?;
        Ok(operands)
    }

    /// Adds the gradient accumulators.
    pub(crate) fn add(&mut self, grads: GradsMut<'a>) -> Result<()> {
        let GradsMut { hidden, lm_head, bias, logits } = grads;
        let roles = [Role::GradHidden, Role::GradLmHead, Role::GradBias, Role::GradLogits];
        for (role, tensor) in roles.into_iter().zip([hidden, lm_head, bias, logits]) {
            if let Some(tensor) = tensor {
                self.update(role, tensor)?;
            }
        }
        Ok(())
    }

    /// Returns `true` if logits are overwritten with their gradient.
    pub(crate) fn are_in_place(&self) -> bool {
        matches!(self.0[..], [(Role::Logits, Operand::UpdateHost(_) | Operand::UpdateDevice(_))])
    }

    /// Returns the policy's inputs, to read only.
    pub(crate) fn inputs(&self) -> Operands<'_> {
        let inputs = self.0.iter().filter_map(|(role, operand)| {
            let read = match operand {
                Operand::ReadHost(tensor) => Operand::ReadHost(*tensor),
                Operand::ReadDevice(tensor) => Operand::ReadDevice(tensor),
                Operand::UpdateHost(tensor) if *role == Role::Logits => Operand::ReadHost(tensor.as_ref()),
                Operand::UpdateDevice(tensor) if *role == Role::Logits => Operand::ReadDevice(tensor),
                Operand::UpdateHost(_) | Operand::UpdateDevice(_) => return None,
            };
            Some((*role, read))
        });
        Operands(inputs.collect())
    }

    fn read(&mut self, role: Role, tensor: TensorRef<'a>) -> Result<()> {
        let operand = match tensor {
            TensorRef::Device(tensor) => match tensor.as_any().downcast_ref() {
                Some(tensor) => Operand::ReadDevice(tensor),
                None => return Err(foreign(role, tensor)),
            },
            host => Operand::ReadHost(host),
        };
        self.0.push((role, operand));
        Ok(())
    }

    fn update(&mut self, role: Role, tensor: TensorMut<'a>) -> Result<()> {
        let operand = match tensor {
            TensorMut::Device(tensor) => {
                if !tensor.as_any().is::<PjrtTensor>() {
                    return Err(foreign(role, tensor));
                }
                match tensor.as_any_mut().downcast_mut() {
                    Some(tensor) => Operand::UpdateDevice(tensor),
                    None => unreachable!("it is one, as has just been seen"),
                }
            }
            host => Operand::UpdateHost(host),
        };
        self.0.push((role, operand));
        Ok(())
    }

    /// Checks that tensors on devices match `layout` and `dtype` for their role, and are on `devices`. This must happen
    /// before they are donated.
    pub(crate) fn check(
        &self,
        devices: &Devices,
        layout: impl Fn(Role) -> Layout,
        dtype: impl Fn(Role) -> Dtype,
    ) -> Result<()> {
        for (role, operand) in &self.0 {
            let tensor = match operand {
                Operand::ReadDevice(tensor) => *tensor,
                Operand::UpdateDevice(tensor) => &**tensor,
                Operand::ReadHost(_) | Operand::UpdateHost(_) => continue,
            };
            tensor.alive()?;
            let expected = layout(*role);
            if tensor.role != *role || tensor.layout != expected {
                let found = format!("`{}` of {:?}", tensor.role.name(), tensor.layout);
                return Err(Error::shape("loss call", role.name(), format!("{expected:?} of this plan"), found));
            }
            if tensor.dtype != dtype(*role) {
                let (expected, found) = (dtype(*role).name(), tensor.dtype.name());
                return Err(Error::shape("loss call", format!("dtype of {}", role.name()), expected, found));
            }
            for (part, device) in tensor.parts.iter().zip(&devices.list) {
                if part.device().map_err(failed)? != *device {
                    let what =
                        format!("the tensor given for `{}`, which lies on devices of another client", role.name());
                    return Err(unsupported(&what, "open one client and share it: `PjrtBackend::new`, or a clone"));
                }
            }
        }
        Ok(())
    }

    /// Copies host tensors to the devices.
    pub(crate) fn upload(
        &self,
        mut upload: impl FnMut(Role, TensorRef<'_>) -> Result<PjrtTensor>,
    ) -> Result<HashMap<Role, PjrtTensor>> {
        let mut uploaded = HashMap::new();
        for (role, operand) in &self.0 {
            let tensor = match operand {
                Operand::ReadHost(tensor) => *tensor,
                Operand::UpdateHost(tensor) => tensor.as_ref(),
                Operand::ReadDevice(_) | Operand::UpdateDevice(_) => continue,
            };
            uploaded.insert(*role, upload(*role, tensor)?);
        }
        Ok(uploaded)
    }

    /// Takes the buffers of accumulators, to donate them: the caller's, or the uploaded ones.
    pub(crate) fn donate(&mut self, uploaded: &mut HashMap<Role, PjrtTensor>) -> HashMap<Role, Vec<Buffer>> {
        let mut donated = HashMap::new();
        for (role, operand) in &mut self.0 {
            let parts = match operand {
                Operand::UpdateDevice(tensor) => std::mem::take(&mut tensor.parts),
                Operand::UpdateHost(_) => uploaded.remove(role).map(|t| t.parts).unwrap_or_default(),
                Operand::ReadHost(_) | Operand::ReadDevice(_) => continue,
            };
            donated.insert(*role, parts);
        }
        donated
    }

    /// Returns the buffers of inputs.
    pub(crate) fn borrowed<'b>(&'b self, uploaded: &'b HashMap<Role, PjrtTensor>) -> HashMap<Role, &'b [Buffer]> {
        let caller = self.0.iter().filter_map(|(role, operand)| match operand {
            Operand::ReadDevice(tensor) => Some((*role, &tensor.parts[..])),
            _ => None,
        });
        uploaded.iter().map(|(role, tensor)| (*role, &tensor.parts[..])).chain(caller).collect()
    }

    /// Returns updated tensors to their owners, on the devices or on the host.
    pub(crate) fn give_back(self, mut results: impl FnMut(Role) -> PjrtTensor) -> Result<()> {
        for (role, operand) in self.0 {
            match operand {
                Operand::UpdateDevice(tensor) => tensor.parts = results(role).parts,
                Operand::UpdateHost(TensorMut::F32(to)) => results(role).read(to)?,
                Operand::UpdateHost(TensorMut::Bf16(to)) => results(role).read(to)?,
                Operand::UpdateHost(TensorMut::Device(_)) | Operand::ReadHost(_) | Operand::ReadDevice(_) => {}
            }
        }
        Ok(())
    }
}

fn foreign(role: Role, tensor: &dyn DeviceTensor) -> Error {
    unsupported(
        &format!("the tensor given for `{}`: {tensor:?}", role.name()),
        "pass host slices, or tensors that a plan of this backend has uploaded",
    )
}
