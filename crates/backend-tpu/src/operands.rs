//! The caller's tensors: inputs and accumulators, on the host or on devices.

use crate::devices::{self, Devices, Layout};
use crate::error::{failed, unsupported};
use crate::padding::Padding;
use crate::program::Role;
use crate::tensor::PjrtTensor;
use grpo_core::error::{Error, Result};
use grpo_core::{DeviceTensor, Dtype, GradsMut, PolicyInput, TensorMut, TensorRef};
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

    /// Checks that tensors on devices have the shape, layout and dtype that `expected` returns for their role, and are on
    /// `devices`. This must happen before they are donated.
    pub(crate) fn check(&self, devices: &Devices, expected: impl Fn(Role) -> (Padding, Layout, Dtype)) -> Result<()> {
        for (role, operand) in &self.0 {
            let tensor = match operand {
                Operand::ReadDevice(tensor) => *tensor,
                Operand::UpdateDevice(tensor) => &**tensor,
                Operand::ReadHost(_) | Operand::UpdateHost(_) => continue,
            };
            let on_devices = tensor.alive()?;
            let ((padding, layout, dtype), count) = (expected(*role), devices.list().len());
            let fits = on_devices.shards().len() == count && on_devices.layout().is(&layout, count);
            if tensor.role != *role || tensor.padding != padding || !fits {
                let expected = format!("{layout} of this plan, for {} elements on {count} devices", padding.elements());
                let (name, shards) = (tensor.role.name(), on_devices.shards().len());
                let found = format!("`{name}` {}, {} elements on {shards}", on_devices.layout(), tensor.elements());
                return Err(Error::shape("loss call", role.name(), expected, found));
            }
            if tensor.dtype != dtype {
                let (expected, found) = (dtype.name(), tensor.dtype.name());
                return Err(Error::shape("loss call", format!("dtype of {}", role.name()), expected, found));
            }
            for (part, device) in on_devices.shards().iter().zip(devices.list()) {
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

    /// Takes accumulators, to donate them: the caller's, or the uploaded ones.
    pub(crate) fn donate(&mut self, uploaded: &mut HashMap<Role, PjrtTensor>) -> HashMap<Role, devices::DeviceTensor> {
        let mut donated = HashMap::new();
        for (role, operand) in &mut self.0 {
            let tensor = match operand {
                Operand::UpdateDevice(tensor) => tensor.tensor.take(),
                Operand::UpdateHost(_) => uploaded.remove(role).and_then(|tensor| tensor.tensor),
                Operand::ReadHost(_) | Operand::ReadDevice(_) => continue,
            };
            donated.extend(tensor.map(|tensor| (*role, tensor)));
        }
        donated
    }

    /// Returns the inputs on the devices.
    pub(crate) fn borrowed<'b>(
        &'b self,
        uploaded: &'b HashMap<Role, PjrtTensor>,
    ) -> HashMap<Role, &'b devices::DeviceTensor> {
        let caller = self.0.iter().filter_map(|(role, operand)| match operand {
            Operand::ReadDevice(tensor) => Some((*role, *tensor)),
            _ => None,
        });
        let all = uploaded.iter().map(|(role, tensor)| (*role, tensor)).chain(caller);
        all.filter_map(|(role, tensor)| Some((role, tensor.tensor.as_ref()?))).collect()
    }

    /// Returns updated tensors to their owners, on the devices or on the host.
    pub(crate) fn give_back(self, mut results: impl FnMut(Role) -> PjrtTensor) -> Result<()> {
        for (role, operand) in self.0 {
            match operand {
                Operand::UpdateDevice(tensor) => tensor.tensor = results(role).tensor,
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
