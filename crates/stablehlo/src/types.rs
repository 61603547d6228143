//! Types of values: a dtype and a static shape.

use std::fmt;
use strum::{Display, IntoStaticStr, VariantArray};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Dtype {
    /// A predicate; prints as `i1`.
    #[strum(serialize = "i1")]
    Pred,
    /// Signed integers of 16 bits.
    I16,
    /// Signed integers of 32 bits.
    I32,
    /// Signed integers of 64 bits.
    I64,
    /// Unsigned integers of 8 bits; prints as `ui8`.
    #[strum(serialize = "ui8")]
    U8,
    /// Unsigned integers of 32 bits; prints as `ui32`.
    #[strum(serialize = "ui32")]
    U32,
    /// Floating point of 16 bits, IEEE binary16.
    F16,
    /// Floating point of 16 bits, bfloat16.
    Bf16,
    /// Floating point of 32 bits, IEEE binary32.
    F32,
    /// Floating point of 64 bits, IEEE binary64.
    F64,
}

impl Dtype {
    /// Returns the name of the type in MLIR.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns `true` for floating-point types.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Returns `true` for integer types; predicates are not integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::I16 | Self::I32 | Self::I64 | Self::U8 | Self::U32)
    }

    /// Returns `true` for unsigned integers.
    pub fn is_unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U32)
    }

    /// Returns the bytes of one element in device memory.
    pub fn bytes(self) -> usize {
        match self {
            Self::Pred | Self::U8 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

/// A dtype and a static shape; prints as `tensor<2x3xf32>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// The dtype of the elements.
    pub dtype: Dtype,
    /// Sizes, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorType {
    /// Makes the type of a tensor of `shape`.
    pub fn new(dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// Makes the type of a scalar.
    pub fn scalar(dtype: Dtype) -> Self {
        Self::new(dtype, [])
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements; `usize::MAX` on overflow.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |n: usize, size| n.saturating_mul(*size))
    }

    /// Returns the bytes of a dense tensor of this type; `usize::MAX` on overflow.
    pub fn bytes(&self) -> usize {
        self.elements().saturating_mul(self.dtype.bytes())
    }

    /// Returns the type of the same shape with another dtype.
    pub fn with_dtype(&self, dtype: Dtype) -> Self {
        Self { dtype, shape: self.shape.clone() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for size in &self.shape {
            write!(f, "{size}x")?;
        }
        write!(f, "{}>", self.dtype)
    }
}
