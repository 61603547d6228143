//! Tensors with a dynamic dtype: owned, read-only views and mutable views, on the host or on a device.

use half::bf16;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::convert::Infallible;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE binary32.
    #[default]
    #[serde(alias = "float32", alias = "fp32")]
    F32,
    /// bfloat16.
    #[serde(alias = "bfloat16")]
    Bf16,
}

impl Dtype {
    /// Returns `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A tensor on a backend's device. Only the backend that created it knows its concrete type.
pub trait DeviceTensor: Any + Send + Sync + std::fmt::Debug {
    /// Returns the element type.
    fn dtype(&self) -> Dtype;
    /// Returns `self` for the backend's downcast.
    fn as_any(&self) -> &dyn Any;
    /// Returns `self` for the backend's downcast.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// A tensor on the host that owns its values, row-major.
///
/// ```
/// use grpo_core::{Dtype, Tensor};
///
/// let lm_head = Tensor::F32(vec![0.02; 8]); // [V, H]
/// let narrow = lm_head.to_dtype(Dtype::Bf16);
/// assert_eq!((narrow.dtype(), narrow.len()), (Dtype::Bf16, 8));
/// assert_eq!(narrow.as_ref().host_len(), Some(8));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// f32 values.
    F32(Vec<f32>),
    /// bf16 values.
    Bf16(Vec<bf16>),
}

impl Tensor {
    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.as_ref().dtype()
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Returns `true` if the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a read-only view.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(values) => TensorRef::F32(values),
            Self::Bf16(values) => TensorRef::Bf16(values),
        }
    }

    /// Returns a mutable view.
    pub fn as_mut(&mut self) -> TensorMut<'_> {
        match self {
            Self::F32(values) => TensorMut::F32(values),
            Self::Bf16(values) => TensorMut::Bf16(values),
        }
    }

    /// Converts the values to another dtype: widened exactly, or rounded to nearest even.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        match (self, dtype) {
            (Self::F32(v), Dtype::Bf16) => Self::Bf16(v.iter().map(|x| bf16::from_f32(*x)).collect()),
            (Self::Bf16(v), Dtype::F32) => Self::F32(v.iter().map(|x| x.to_f32()).collect()),
            (same, _) => same.clone(),
        }
    }
}

/// A read-only tensor on the host or on a device. With `D` = [`Infallible`] it is known to be on the host.
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
pub enum TensorRef<'a, D = &'a dyn DeviceTensor> {
    /// On the host, row-major.
    F32(&'a [f32]),
    /// On the host, row-major.
    Bf16(&'a [bf16]),
    /// On a device.
    Device(D),
}

/// A mutable tensor on the host or on a device. With `D` = [`Infallible`] it is known to be on the host.
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
pub enum TensorMut<'a, D = &'a mut dyn DeviceTensor> {
    /// On the host, row-major.
    F32(&'a mut [f32]),
    /// On the host, row-major.
    Bf16(&'a mut [bf16]),
    /// On a device.
    Device(D),
}

impl<'a> TensorRef<'a> {
    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::Device(t) => t.dtype(),
        }
    }

    /// Returns the number of elements of a tensor on the host; `None` on a device.
    pub fn host_len(&self) -> Option<usize> {
        match self {
            Self::F32(t) => Some(t.len()),
            Self::Bf16(t) => Some(t.len()),
            Self::Device(_) => None,
        }
    }

    /// Returns the tensor if it is on the host.
    pub fn on_host(self) -> Option<TensorRef<'a, Infallible>> {
        match self {
            Self::F32(t) => Some(TensorRef::F32(t)),
            Self::Bf16(t) => Some(TensorRef::Bf16(t)),
            Self::Device(_) => None,
        }
    }
}

impl<'a> TensorMut<'a> {
    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.as_ref().dtype()
    }

    /// Returns the number of elements of a tensor on the host; `None` on a device.
    pub fn host_len(&self) -> Option<usize> {
        self.as_ref().host_len()
    }

    /// Returns a read-only view of the same tensor.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(t) => TensorRef::F32(t),
            Self::Bf16(t) => TensorRef::Bf16(t),
            Self::Device(t) => TensorRef::Device(&**t),
        }
    }

    /// Returns the tensor if it is on the host.
    pub fn on_host(self) -> Option<TensorMut<'a, Infallible>> {
        match self {
            Self::F32(t) => Some(TensorMut::F32(t)),
            Self::Bf16(t) => Some(TensorMut::Bf16(t)),
            Self::Device(_) => None,
        }
    }
}

/// Conversions from slices, vectors and arrays on the host.
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

impl From<Vec<f32>> for Tensor {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<bf16>> for Tensor {
    fn from(values: Vec<bf16>) -> Self {
        Self::Bf16(values)
    }
}

impl<'a, T: DeviceTensor> From<&'a T> for TensorRef<'a> {
    fn from(tensor: &'a T) -> Self {
        Self::Device(tensor)
    }
}

impl<'a, T: DeviceTensor> From<&'a mut T> for TensorMut<'a> {
    fn from(tensor: &'a mut T) -> Self {
        Self::Device(tensor)
    }
}
