//! Values of constants.

use crate::types::Dtype;

/// The values of a constant.
#[derive(Clone, Debug, PartialEq)]
pub enum Literal {
    /// All elements are the same number.
    Splat(Number),
    /// All elements, row-major.
    Dense(Vec<Number>),
}

/// An element of a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An element of a predicate.
    Bool(bool),
    /// An element of an integer type.
    Int(i64),
    /// An element of a floating-point type; printing rounds it to the type.
    Float(f64),
}

impl From<bool> for Number {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl Number {
    /// Returns the zero of a dtype.
    pub fn zero(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Pred => Self::Bool(false),
            dtype if dtype.is_float() => Self::Float(0.0),
            _ => Self::Int(0),
        }
    }

    /// Returns `true` if the number can be an element of `dtype`.
    pub fn fits(self, dtype: Dtype) -> bool {
        match self {
            Self::Bool(_) => dtype == Dtype::Pred,
            Self::Int(value) => match dtype {
                Dtype::I16 => i16::try_from(value).is_ok(),
                Dtype::I32 => i32::try_from(value).is_ok(),
                Dtype::U32 => u32::try_from(value).is_ok(),
                Dtype::I64 => true,
                _ => false,
            },
            Self::Float(_) => dtype.is_float(),
        }
    }
}
