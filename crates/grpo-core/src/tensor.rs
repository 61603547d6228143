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
///
/// ```
/// use grpo_core::half::bf16;
/// use grpo_core::{Dtype, TensorRef};
///
/// let hidden = vec![bf16::from_f32(0.5); 8]; // [N, H], row-major
/// let tensor = TensorRef::from(&hidden);
/// assert_eq!((tensor.dtype(), tensor.host_len()), (Dtype::Bf16, Some(8)));
/// assert_eq!(TensorRef::from(&[1.0_f32, 2.0]).dtype(), Dtype::F32);
/// ```
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
///
/// ```
/// use grpo_core::half::bf16;
/// use grpo_core::{Dtype, TensorMut};
///
/// let mut gradient = vec![bf16::ZERO; 8];
/// let tensor = TensorMut::from(&mut gradient);
/// assert_eq!((tensor.dtype(), tensor.host_len()), (Dtype::Bf16, Some(8)));
/// assert_eq!(TensorMut::from(&mut [0.0_f32; 2]).dtype(), Dtype::F32);
/// ```
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

/// Slices, vectors and arrays on the host, to read and to write.
macro_rules! from_host {
    ($($element:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a [$element]> for TensorRef<'a> {
            fn from(t: &'a [$element]) -> Self {
                Self::$variant(t)
            }
        }

        impl<'a> From<&'a Vec<$element>> for TensorRef<'a> {
            fn from(t: &'a Vec<$element>) -> Self {
                Self::$variant(t)
            }
        }

        impl<'a, const N: usize> From<&'a [$element; N]> for TensorRef<'a> {
            fn from(t: &'a [$element; N]) -> Self {
                Self::$variant(t)
            }
        }

        impl<'a> From<&'a mut [$element]> for TensorMut<'a> {
            fn from(t: &'a mut [$element]) -> Self {
                Self::$variant(t)
            }
        }

        impl<'a> From<&'a mut Vec<$element>> for TensorMut<'a> {
            fn from(t: &'a mut Vec<$element>) -> Self {
                Self::$variant(t)
            }
        }

        impl<'a, const N: usize> From<&'a mut [$element; N]> for TensorMut<'a> {
            fn from(t: &'a mut [$element; N]) -> Self {
                Self::$variant(t)
            }
        }
    )*};
}

from_host!(f32 => F32, bf16 => Bf16);
