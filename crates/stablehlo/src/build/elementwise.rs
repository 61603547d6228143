//! Operations on elements: all operands have one shape. There is no implicit broadcast.

use super::Value;
use crate::graph::{Binary, Comparison, Kind, Unary};
use crate::types::{Dtype, TensorType};
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Sub};

fn same(a: &TensorType, b: &TensorType) -> Result<(), String> {
    if a == b { Ok(()) } else { Err(format!("operands of one type expected, got {a} and {b}")) }
}

impl Value {
    /// One of the operations of one operand.
    #[track_caller]
    pub fn unary(&self, operation: Unary) -> Self {
        let ty = self.ty();
        let legal = match operation {
            Unary::Not => ty.dtype == Dtype::Pred || ty.dtype.is_integer(),
            Unary::Negate => ty.dtype != Dtype::Pred,
            Unary::Abs | Unary::Sign => !matches!(ty.dtype, Dtype::Pred | Dtype::U32),
            _ => ty.dtype.is_float(),
        };
        let result = if operation == Unary::IsFinite { ty.with_dtype(Dtype::Pred) } else { ty.clone() };
        self.then(Kind::Unary(operation), &[], if legal { Ok(result) } else { Err(format!("not defined for {ty}")) })
    }

    /// One of the operations of two operands.
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

    /// Predicates of `self direction other`.
    #[track_caller]
    pub fn compare(&self, direction: Comparison, other: &Self) -> Self {
        let result = self.ty().with_dtype(Dtype::Pred);
        self.then(Kind::Compare(direction), &[other], same(self.ty(), other.ty()).map(|()| result))
    }

    /// `self`, a predicate of the same shape or a scalar, chooses between `on_true` and `on_false`.
    #[track_caller]
    pub fn select(&self, on_true: &Self, on_false: &Self) -> Self {
        let (p, ty) = (self.ty(), on_true.ty());
        let check = if p.dtype != Dtype::Pred || (p.rank() != 0 && p.shape != ty.shape) {
            Err(format!("a predicate of the shape of {ty} expected, got {p}"))
        } else {
            same(ty, on_false.ty()).map(|()| ty.clone())
        };
        let operands = [self, on_true, on_false];
        self.builder().emit(Kind::Select, &operands, check.map(|t| vec![t]), || on_true.ty().clone())
    }

    /// Held between `low` and `high`, each a scalar or of the same shape.
    #[track_caller]
    pub fn clamp(&self, low: &Self, high: &Self) -> Self {
        let ty = self.ty();
        let bound = |b: &Self| b.dtype() == ty.dtype && (b.shape().is_empty() || b.shape() == ty.shape);
        let check = if bound(low) && bound(high) {
            Ok(vec![ty.clone()])
        } else {
            Err(format!("bounds of {ty} expected, got {} and {}", low.ty(), high.ty()))
        };
        self.builder().emit(Kind::Clamp, &[low, self, high], check, || ty.clone())
    }

    /// The same numbers in another dtype; no operation is added where they have it already.
    #[track_caller]
    pub fn convert(&self, dtype: Dtype) -> Self {
        if dtype == self.dtype() {
            return self.clone();
        }
        self.then(Kind::Convert, &[], Ok(self.ty().with_dtype(dtype)))
    }

    /// The same bits as another dtype of the same width: the u32 of an f32, say. No operation is added where they are of
    /// that dtype already.
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

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $operation:ident;)*) => {
        impl Value {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self) -> Self {
                self.unary(Unary::$operation)
            })*
        }
    };
}

unary! {
    /// The exponential e^x.
    exp Exponential;
    /// e^x - 1, exact near 0.
    expm1 ExponentialMinusOne;
    /// The natural logarithm ln x.
    log Log;
    /// ln(1 + x), exact near 0.
    log1p LogPlusOne;
    /// The absolute value |x|.
    abs Abs;
    /// The square root of x.
    sqrt Sqrt;
    /// The hyperbolic tangent tanh x.
    tanh Tanh;
    /// Neither infinite nor NaN.
    is_finite IsFinite;
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $operation:ident;)*) => {
        impl Value {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self, other: &Self) -> Self {
                self.binary(Binary::$operation, other)
            })*
        }
    };
}

binary! {
    /// The larger; NaN if either is.
    max Maximum;
    /// The smaller; NaN if either is.
    min Minimum;
    /// Remainder with the sign of `self`.
    rem Remainder;
    /// `self` to the power of `other`.
    pow Power;
    /// The bits of integers moved up by `other`; 0 where that is the width or more.
    shift_left ShiftLeft;
    /// The bits of integers moved down by `other`, with zeros from above.
    shift_right_logical ShiftRightLogical;
    /// The bits of integers moved down by `other`, with copies of the highest from above.
    shift_right_arithmetic ShiftRightArithmetic;
}

macro_rules! compare {
    ($($name:ident $direction:ident $sign:literal;)*) => {
        impl Value {
            $(#[doc = concat!("Predicates of `self ", $sign, " other`.")]
            #[track_caller]
            pub fn $name(&self, other: &Self) -> Self {
                self.compare(Comparison::$direction, other)
            })*
        }
    };
}

compare! {
    eq Eq "==";
    ne Ne "!=";
    lt Lt "<";
    le Le "<=";
    gt Gt ">";
    ge Ge ">=";
}

macro_rules! operators {
    ($($trait:ident $method:ident $operation:ident;)*) => {
        $(impl $trait for &Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: Self) -> Value {
                self.binary(Binary::$operation, other)
            }
        }

        impl $trait for Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: Self) -> Value {
                self.binary(Binary::$operation, &other)
            }
        }

        impl $trait<&Value> for Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: &Value) -> Value {
                self.binary(Binary::$operation, other)
            }
        }

        impl $trait<Value> for &Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: Value) -> Value {
                self.binary(Binary::$operation, &other)
            }
        })*
    };
}

operators! {
    Add add Add;
    Sub sub Subtract;
    Mul mul Multiply;
    Div div Divide;
    BitAnd bitand And;
    BitOr bitor Or;
    BitXor bitxor Xor;
}

impl Neg for &Value {
    type Output = Value;
    #[track_caller]
    fn neg(self) -> Value {
        self.unary(Unary::Negate)
    }
}

impl Neg for Value {
    type Output = Value;
    #[track_caller]
    fn neg(self) -> Value {
        self.unary(Unary::Negate)
    }
}

impl Not for &Value {
    type Output = Value;
    #[track_caller]
    fn not(self) -> Value {
        self.unary(Unary::Not)
    }
}
