//! Views of the tensors that cross the seam.

use half::bf16;
use serde::{Deserialize, Serialize};
use std::any::Any;
use strum::IntoStaticStr;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[cfg_attr(test, derive(strum::VariantArray))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Dtype {
    /// IEEE binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A tensor that already lives on a backend's device. Only the backend that made it knows what is behind it.
pub trait DeviceTensor: Any + Send + Sync + std::fmt::Debug {
    /// Of its elements.
    fn dtype(&self) -> Dtype;
    /// For the backend to recognise its own.
    fn as_any(&self) -> &dyn Any;
    /// For the backend to recognise its own.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A tensor to read.
#[derive(Clone, Copy, Debug)]
pub enum TensorRef<'a> {
    /// On the host, row-major.
    F32(&'a [f32]),
    /// On the host, row-major.
    Bf16(&'a [bf16]),
    /// On a device.
    Device(&'a dyn DeviceTensor),
}

/// A tensor to write.
#[derive(Debug)]
pub enum TensorMut<'a> {
    /// On the host, row-major.
    F32(&'a mut [f32]),
    /// On the host, row-major.
    Bf16(&'a mut [bf16]),
    /// On a device.
    Device(&'a mut dyn DeviceTensor),
}

impl TensorRef<'_> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::Device(t) => t.dtype(),
        }
    }

    /// Number of elements, if on the host.
    pub fn host_len(&self) -> Option<usize> {
        match self {
            Self::F32(t) => Some(t.len()),
            Self::Bf16(t) => Some(t.len()),
            Self::Device(_) => None,
        }
    }
}

impl TensorMut<'_> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.as_ref().dtype()
    }

    /// Number of elements, if on the host.
    pub fn host_len(&self) -> Option<usize> {
        self.as_ref().host_len()
    }

    /// The same tensor, to read.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(t) => TensorRef::F32(t),
            Self::Bf16(t) => TensorRef::Bf16(t),
            Self::Device(t) => TensorRef::Device(&**t),
        }
    }
}

impl<'a> From<&'a [f32]> for TensorRef<'a> {
    fn from(t: &'a [f32]) -> Self {
        Self::F32(t)
    }
}

impl<'a> From<&'a [bf16]> for TensorRef<'a> {
    fn from(t: &'a [bf16]) -> Self {
        Self::Bf16(t)
    }
}

impl<'a> From<&'a mut [f32]> for TensorMut<'a> {
    fn from(t: &'a mut [f32]) -> Self {
        Self::F32(t)
    }
}

impl<'a> From<&'a mut [bf16]> for TensorMut<'a> {
    fn from(t: &'a mut [bf16]) -> Self {
        Self::Bf16(t)
    }
}

impl<'a> From<&'a Vec<f32>> for TensorRef<'a> {
    fn from(t: &'a Vec<f32>) -> Self {
        Self::F32(t)
    }
}

impl<'a> From<&'a mut Vec<f32>> for TensorMut<'a> {
    fn from(t: &'a mut Vec<f32>) -> Self {
        Self::F32(t)
    }
}
