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

    /// Returns the smallest and the largest number of a dtype.
    pub(crate) fn range(dtype: Dtype) -> [Self; 2] {
        let ints = |low: i64, high: i64| [Self::Int(low), Self::Int(high)];
        match dtype {
            Dtype::Pred => [Self::Bool(false), Self::Bool(true)],
            Dtype::I16 => ints(i16::MIN.into(), i16::MAX.into()),
            Dtype::I32 => ints(i32::MIN.into(), i32::MAX.into()),
            Dtype::I64 => ints(i64::MIN, i64::MAX),
            Dtype::U8 => ints(0, u8::MAX.into()),
            Dtype::U32 => ints(0, u32::MAX.into()),
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => {
                [Self::Float(f64::NEG_INFINITY), Self::Float(f64::INFINITY)]
            }
        }
    }

    /// Returns `true` if the number can be an element of `dtype`.
    pub fn fits(self, dtype: Dtype) -> bool {
        match (self, Self::range(dtype)) {
            (Self::Int(value), [Self::Int(low), Self::Int(high)]) => (low..=high).contains(&value),
            (Self::Bool(_), [Self::Bool(_), _]) | (Self::Float(_), [Self::Float(_), _]) => true,
            _ => false,
        }
    }
}
