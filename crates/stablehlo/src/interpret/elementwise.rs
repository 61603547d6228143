//! Element-wise operations on f64 floats, integers that wrap at their width, and predicates.

use super::Fault;
use super::array::{Array, Elements, map_pairs, wrap};
use crate::graph::{Binary, Comparison, Unary};
use crate::types::{Dtype, TensorType};

type Outcome = Result<Elements, Fault>;

/// Checks that the operands have the shape of the result.
fn aligned(operands: &[&Array], ty: &TensorType) -> Result<(), Fault> {
    match operands.iter().find(|a| a.ty.shape != ty.shape) {
        Some(a) => Err(Fault::malformed(format!("operands of shape {:?} expected, got {}", ty.shape, a.ty))),
        None => Ok(()),
    }
}

pub(super) fn unary(operation: Unary, a: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a], ty)?;
    let undefined = || Fault::malformed(format!("not defined for {}", a.ty));
    match &a.elements {
        Elements::Float(x) if operation == Unary::IsFinite => {
            Ok(Elements::Pred(x.iter().map(|x| x.is_finite()).collect()))
        }
        Elements::Float(x) => {
            let f = operation.of_float().ok_or_else(undefined)?;
            Ok(Elements::Float(x.iter().map(|x| f(*x)).collect()))
        }
        Elements::Int(x) => {
            let f = operation.of_int().ok_or_else(undefined)?;
            Ok(Elements::Int(x.iter().map(|x| wrap(f(*x), a.ty.dtype)).collect()))
        }
        Elements::Pred(x) if operation == Unary::Not => Ok(Elements::Pred(x.iter().map(|x| !x).collect())),
        Elements::Pred(_) => Err(undefined()),
    }
}

pub(super) fn binary(operation: Binary, a: &Array, b: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a, b], ty)?;
    combine(operation, &a.elements, &b.elements, ty.dtype)
}

/// Combines elements of `dtype` pair by pair; both sides have the same number of elements.
pub(super) fn combine(operation: Binary, a: &Elements, b: &Elements, dtype: Dtype) -> Outcome {
    let undefined = || Fault::malformed(format!("{} is not defined for {dtype}", operation.name()));
    match (a, b) {
        (Elements::Float(a), Elements::Float(b)) => {
            let f = operation.of_floats().ok_or_else(undefined)?;
            Ok(Elements::Float(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()))
        }
        (Elements::Int(a), Elements::Int(b)) => {
            let f = operation.of_ints();
            Ok(Elements::Int(a.iter().zip(b).map(|(a, b)| f(*a, *b, dtype)).collect()))
        }
        (Elements::Pred(a), Elements::Pred(b)) => {
            let f = operation.of_preds().ok_or_else(undefined)?;
            Ok(Elements::Pred(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()))
        }
        _ => Err(Fault::malformed("operands of one dtype expected")),
    }
}

pub(super) fn compare(direction: Comparison, a: &Array, b: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a, b], ty)?;
    fn all<T: PartialOrd>(direction: Comparison, a: &[T], b: &[T]) -> Elements {
        Elements::Pred(a.iter().zip(b).map(|(a, b)| direction.holds(a, b)).collect())
    }
    match (&a.elements, &b.elements) {
        (Elements::Float(a), Elements::Float(b)) => Ok(all(direction, a, b)),
        (Elements::Int(a), Elements::Int(b)) => Ok(all(direction, a, b)),
        (Elements::Pred(a), Elements::Pred(b)) => Ok(all(direction, a, b)),
        _ => Err(Fault::malformed(format!("operands of one dtype expected, got {} and {}", a.ty, b.ty))),
    }
}

pub(super) fn select(p: &Array, on_true: &Array, on_false: &Array, ty: &TensorType) -> Outcome {
    aligned(&[on_true, on_false], ty)?;
    if p.ty.rank() == 0 {
        return Ok(if p.predicate()? { on_true } else { on_false }.elements.clone());
    }
    aligned(&[p], ty)?;
    let Elements::Pred(p) = &p.elements else {
        return Err(Fault::malformed(format!("a predicate expected, got {}", p.ty)));
    };
    map_pairs!(&on_true.elements, &on_false.elements, (x, y) => {
        p.iter().zip(x.iter().zip(y)).map(|(p, (x, y))| if *p { *x } else { *y }).collect()
    })
}

/// Computes min(high, max(low, operand)), as the specification defines it.
pub(super) fn clamp(low: &Array, a: &Array, high: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a], ty)?;
    let bound = |bound: &Array| -> Outcome {
        match bound.ty.rank() {
            0 => bound.repeated(ty.elements()),
            _ => aligned(&[bound], ty).map(|()| bound.elements.clone()),
        }
    };
    let raised = combine(Binary::Maximum, &bound(low)?, &a.elements, ty.dtype)?;
    combine(Binary::Minimum, &bound(high)?, &raised, ty.dtype)
}

/// Floats are rounded towards 0 and clamped to the range of the integer dtype; NaN becomes 0. Integers wrap to a
/// narrower dtype.
pub(super) fn convert(a: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a], ty)?;
    Ok(match (&a.elements, ty.dtype) {
        (_, Dtype::Pred) => Elements::Pred(a.to_preds()),
        (Elements::Float(x), Dtype::I16) => Elements::Int(x.iter().map(|x| i64::from(*x as i16)).collect()),
        (Elements::Float(x), Dtype::I32) => Elements::Int(x.iter().map(|x| i64::from(*x as i32)).collect()),
        (Elements::Float(x), Dtype::U32) => Elements::Int(x.iter().map(|x| i64::from(*x as u32)).collect()),
        (_, dtype) if dtype.is_integer() => Elements::Int(a.to_ints().into_iter().map(|x| wrap(x, dtype)).collect()),
        _ => Elements::Float(a.to_floats()),
    })
}

/// Reinterprets the bits of the operand, after rounding it to its dtype.
pub(super) fn bitcast(a: &Array, ty: &TensorType) -> Outcome {
    aligned(&[a], ty)?;
    let from = a.ty.dtype;
    if from == ty.dtype {
        return Ok(a.elements.clone());
    }
    if from.bytes() != ty.dtype.bytes() || from == Dtype::Pred || ty.dtype == Dtype::Pred {
        return Err(Fault::malformed(format!("dtypes of one width expected, got {} and {ty}", a.ty)));
    }
    let bits: Vec<u64> = match &a.elements {
        Elements::Int(x) => x.iter().map(|x| *x as u64).collect(),
        Elements::Float(x) => x.iter().map(|x| float_bits(*x, from)).collect(),
        Elements::Pred(x) => x.iter().map(|x| u64::from(*x)).collect(),
    };
    Ok(if ty.dtype.is_float() {
        Elements::Float(bits.into_iter().map(|bits| float_of(bits, ty.dtype)).collect())
    } else {
        Elements::Int(bits.into_iter().map(|bits| wrap(bits as i64, ty.dtype)).collect())
    })
}

fn float_bits(x: f64, dtype: Dtype) -> u64 {
    match dtype {
        Dtype::F16 => half::f16::from_f64(x).to_bits().into(),
        Dtype::Bf16 => half::bf16::from_f64(x).to_bits().into(),
        Dtype::F32 => (x as f32).to_bits().into(),
        _ => x.to_bits(),
    }
}

fn float_of(bits: u64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => half::f16::from_bits(bits as u16).to_f64(),
        Dtype::Bf16 => half::bf16::from_bits(bits as u16).to_f64(),
        Dtype::F32 => f32::from_bits(bits as u32).into(),
        _ => f64::from_bits(bits),
    }
}

impl Unary {
    /// Returns `None` if the operation does not take floats, or does not return them.
    fn of_float(self) -> Option<fn(f64) -> f64> {
        Some(match self {
            Self::Abs => f64::abs,
            Self::Negate => |x| -x,
            Self::Sign => |x| if x == 0.0 || x.is_nan() { x } else { x.signum() },
            Self::Exponential => f64::exp,
            Self::ExponentialMinusOne => f64::exp_m1,
            Self::Log => f64::ln,
            Self::LogPlusOne => f64::ln_1p,
            Self::Logistic => |x| 1.0 / (1.0 + (-x).exp()),
            Self::Tanh => f64::tanh,
            Self::Sqrt => f64::sqrt,
            Self::Rsqrt => |x| 1.0 / x.sqrt(),
            Self::Floor => f64::floor,
            Self::Ceil => f64::ceil,
            Self::Cosine => f64::cos,
            Self::Sine => f64::sin,
            Self::IsFinite | Self::Not => return None,
        })
    }

    /// Returns `None` if the operation does not take integers.
    fn of_int(self) -> Option<fn(i64) -> i64> {
        Some(match self {
            Self::Abs => i64::wrapping_abs,
            Self::Negate => i64::wrapping_neg,
            Self::Sign => i64::signum,
            Self::Not => |x| !x,
            Self::Exponential
            | Self::ExponentialMinusOne
            | Self::Log
            | Self::LogPlusOne
            | Self::Logistic
            | Self::Tanh
            | Self::Sqrt
            | Self::Rsqrt
            | Self::Floor
            | Self::Ceil
            | Self::Cosine
            | Self::Sine
            | Self::IsFinite => return None,
        })
    }
}

impl Binary {
    /// Returns `None` if the operation does not take floats.
    fn of_floats(self) -> Option<fn(f64, f64) -> f64> {
        Some(match self {
            Self::Add => |a, b| a + b,
            Self::Subtract => |a, b| a - b,
            Self::Multiply => |a, b| a * b,
            Self::Divide => |a, b| a / b,
            // The sign of the dividend, as in Rust.
            Self::Remainder => |a, b| a % b,
            Self::Power => f64::powf,
            Self::Maximum => |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) },
            Self::Minimum => |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) },
            Self::And | Self::Or | Self::Xor => return None,
            Self::ShiftLeft | Self::ShiftRightLogical | Self::ShiftRightArithmetic => return None,
        })
    }

    /// Returns the operation on integers of `dtype`. Where the specification leaves the result open, it follows XLA: x
    /// / 0 has all bits set, x % 0 is x.
    fn of_ints(self) -> fn(i64, i64, Dtype) -> i64 {
        match self {
            Self::Add => |a, b, dtype| wrap(a.wrapping_add(b), dtype),
            Self::Subtract => |a, b, dtype| wrap(a.wrapping_sub(b), dtype),
            Self::Multiply => |a, b, dtype| wrap(a.wrapping_mul(b), dtype),
            Self::Divide => |a, b, dtype| wrap(if b == 0 { -1 } else { a.wrapping_div(b) }, dtype),
            Self::Remainder => |a, b, dtype| wrap(if b == 0 { a } else { a.wrapping_rem(b) }, dtype),
            Self::Power => power,
            Self::Maximum => |a, b, _| a.max(b),
            Self::Minimum => |a, b, _| a.min(b),
            Self::And => |a, b, _| a & b,
            Self::Or => |a, b, _| a | b,
            Self::Xor => |a, b, _| a ^ b,
            // A shift by the width or more, or by a negative number, gives 0.
            Self::ShiftLeft => |a, b, dtype| if (0..width(dtype)).contains(&b) { wrap(a << b, dtype) } else { 0 },
            Self::ShiftRightLogical => |a, b, dtype| {
                let bits = a as u64 & (u64::MAX >> (64 - width(dtype)));
                if (0..width(dtype)).contains(&b) { wrap((bits >> b) as i64, dtype) } else { 0 }
            },
            Self::ShiftRightArithmetic => |a, b, dtype| {
                let signed = if dtype == Dtype::U32 { wrap(a, Dtype::I32) } else { a };
                wrap(signed >> if (0..width(dtype)).contains(&b) { b } else { width(dtype) - 1 }, dtype)
            },
        }
    }

    /// Returns the operation on predicates, which act as one-bit integers: addition is or, multiplication is and.
    /// `None` if the operation does not take predicates.
    fn of_preds(self) -> Option<fn(bool, bool) -> bool> {
        Some(match self {
            Self::Add | Self::Or | Self::Maximum => |a, b| a | b,
            Self::Multiply | Self::And | Self::Minimum => |a, b| a & b,
            Self::Xor => |a, b| a ^ b,
            Self::Subtract | Self::Divide | Self::Remainder | Self::Power => return None,
            Self::ShiftLeft | Self::ShiftRightLogical | Self::ShiftRightArithmetic => return None,
        })
    }
}

impl Comparison {
    fn holds<T: PartialOrd>(self, a: &T, b: &T) -> bool {
        match self {
            Self::Eq => a == b,
            Self::Ne => a != b,
            Self::Lt => a < b,
            Self::Le => a <= b,
            Self::Gt => a > b,
            Self::Ge => a >= b,
        }
    }
}

fn width(dtype: Dtype) -> i64 {
    8 * dtype.bytes() as i64
}

/// Computes the power by repeated squaring and wraps; a negative exponent rounds the fraction towards 0.
fn power(base: i64, exponent: i64, dtype: Dtype) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut result, mut square, mut rest) = (1_i64, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest >>= 1;
    }
    wrap(result, dtype)
}
