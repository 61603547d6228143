//! Element-wise operations. All operands have one shape; there is no implicit broadcast.

use super::Value;
use crate::graph::{Binary, Comparison, Kind, Unary};
use crate::operators::{common_operators, named, operators};
use crate::types::{Dtype, TensorType};

/// Checks that two operands have one type.
pub(crate) fn same(a: &TensorType, b: &TensorType) -> Result<(), String> {
    if a == b { Ok(()) } else { Err(format!("operands of one type expected, got {a} and {b}")) }
}

impl Value {
    /// Applies an element-wise operation of one operand.
    #[track_caller]
    pub fn unary(&self, operation: Unary) -> Self {
        let ty = self.ty();
        let legal = match operation {
            Unary::Not => ty.dtype == Dtype::Pred || ty.dtype.is_integer(),
            Unary::Negate => ty.dtype != Dtype::Pred,
            Unary::Abs | Unary::Sign => ty.dtype != Dtype::Pred && !ty.dtype.is_unsigned(),
            _ => ty.dtype.is_float(),
        };
        let result = if operation == Unary::IsFinite { ty.with_dtype(Dtype::Pred) } else { ty.clone() };
        self.then(Kind::Unary(operation), &[], if legal { Ok(result) } else { Err(format!("not defined for {ty}")) })
    }

    /// Applies an element-wise operation of two operands.
    #[track_caller]
    pub fn binary(&self, operation: Binary, other: &Self) -> Self {
        let ty = self.ty();
        let legal = match operation {
            Binary::And | Binary::Or | Binary::Xor => !ty.dtype.is_float(),
            Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => ty.dtype.is_integer(),
            _ => ty.dtype != Dtype::Pred,
        };
        let check = same(ty, other.ty()).and(if legal { Ok(ty.clone()) } else { Err(format!("not defined for {ty}")) });
        self.then(Kind::Binary(operation), &[other], check)
    }

    /// Compares element by element and returns predicates.
    #[track_caller]
    pub fn compare(&self, direction: Comparison, other: &Self) -> Self {
        let result = self.ty().with_dtype(Dtype::Pred);
        self.then(Kind::Compare(direction), &[other], same(self.ty(), other.ty()).map(|()| result))
    }

    /// Chooses between the elements of `on_true` and `on_false`; `self` is a predicate of the same shape, or a scalar.
    #[track_caller]
    pub fn select(&self, on_true: &Self, on_false: &Self) -> Self {
        let (p, ty) = (self.ty(), on_true.ty());
        let check = if p.dtype != Dtype::Pred || (p.rank() != 0 && p.shape != ty.shape) {
            Err(format!("a predicate of the shape of {ty} expected, got {p}"))
        } else {
            same(ty, on_false.ty()).map(|()| ty.clone())
        };
        self.builder().emit(Kind::Select, &[self, on_true, on_false], check, ty)
    }

    /// Limits the elements to the range from `low` to `high`, each a scalar or of the same shape.
    #[track_caller]
    pub fn clamp(&self, low: &Self, high: &Self) -> Self {
        let ty = self.ty();
        let bound = |b: &Self| b.dtype() == ty.dtype && (b.shape().is_empty() || b.shape() == ty.shape);
        let check = if bound(low) && bound(high) {
            Ok(ty.clone())
        } else {
            Err(format!("bounds of {ty} expected, got {} and {}", low.ty(), high.ty()))
        };
        self.builder().emit(Kind::Clamp, &[low, self, high], check, ty)
    }

    /// Converts to another dtype. Adds no operation if the dtype is already right.
    #[track_caller]
    pub fn convert(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype() {
            return self.clone();
        }
        self.then(Kind::Convert, &[], Ok(self.ty().with_dtype(dtype)))
    }

    /// Reinterprets the bits as another dtype of the same width, for example f32 as u32. Adds no operation if the dtype
    /// is already right.
    #[track_caller]
    pub fn bitcast_convert(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype() {
            return self.clone();
        }
        let legal = dtype.bytes() == self.dtype().bytes() && ![dtype, self.dtype()].contains(&Dtype::Pred);
        let check = match legal {
            true => Ok(self.ty().with_dtype(dtype)),
            false => Err(format!("a dtype as wide as {} expected, got {dtype}", self.dtype())),
        };
        self.then(Kind::BitcastConvert, &[], check)
    }
}

common_operators!();

named! {
    /// Computes e^x - 1, accurate near 0.
    expm1() unary Unary::ExponentialMinusOne;
    /// Computes ln(1 + x), accurate near 0.
    log1p() unary Unary::LogPlusOne;
    /// Computes the square root of x.
    sqrt() unary Unary::Sqrt;
    /// Computes the hyperbolic tangent tanh x.
    tanh() unary Unary::Tanh;
    /// Returns `true` for elements that are neither infinite nor NaN.
    is_finite() unary Unary::IsFinite;
    /// Shifts integers left by `other` bits; 0 if `other` is the width or more.
    shift_left(other) binary Binary::ShiftLeft;
    /// Shifts integers right by `other` bits and fills with the sign bit.
    shift_right_arithmetic(other) binary Binary::ShiftRightArithmetic;
}

impl std::ops::Not for &Value {
    type Output = Value;
    #[track_caller]
    fn not(self) -> Value {
        self.unary(Unary::Not)
    }
}
