//! Element-wise operations on f64 floats, integers that wrap at their width, and predicates.

use super::array::{Array, Elements, ill_typed, map_pairs, wrap};
use crate::graph::{Binary, Comparison, Unary};
use crate::types::Dtype;

pub(crate) fn unary(operation: Unary, a: &Array) -> Elements {
    match &a.elements {
        Elements::Float(x) if operation == Unary::IsFinite => Elements::Pred(x.iter().map(|x| x.is_finite()).collect()),
        Elements::Float(x) => Elements::Float(x.iter().map(|x| operation.of_float(*x)).collect()),
        Elements::Int(x) => Elements::Int(x.iter().map(|x| wrap(operation.of_int(*x), a.ty.dtype)).collect()),
        Elements::Pred(x) => Elements::Pred(x.iter().map(|x| !x).collect()),
    }
}

/// Combines elements of `dtype` pair by pair; both sides have the same number of elements.
pub(crate) fn combine(operation: Binary, a: &Elements, b: &Elements, dtype: Dtype) -> Elements {
    match (a, b) {
        (Elements::Float(a), Elements::Float(b)) => {
            let f = operation.of_floats();
            Elements::Float(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect())
        }
        (Elements::Int(a), Elements::Int(b)) => {
            let f = operation.of_ints();
            Elements::Int(a.iter().zip(b).map(|(a, b)| f(*a, *b, dtype)).collect())
        }
        (Elements::Pred(a), Elements::Pred(b)) => {
            let f = operation.of_preds();
            Elements::Pred(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect())
        }
        _ => ill_typed("operands of one dtype"),
    }
}

pub(crate) fn compare(direction: Comparison, a: &Array, b: &Array) -> Elements {
    fn all<T: PartialOrd>(direction: Comparison, a: &[T], b: &[T]) -> Elements {
        Elements::Pred(a.iter().zip(b).map(|(a, b)| direction.holds(a, b)).collect())
    }
    match (&a.elements, &b.elements) {
        (Elements::Float(a), Elements::Float(b)) => all(direction, a, b),
        (Elements::Int(a), Elements::Int(b)) => all(direction, a, b),
        (Elements::Pred(a), Elements::Pred(b)) => all(direction, a, b),
        _ => ill_typed("operands of one dtype"),
    }
}

pub(crate) fn select(p: &Array, on_true: &Array, on_false: &Array) -> Elements {
    if p.ty.rank() == 0 {
        return if p.predicate() { on_true } else { on_false }.elements.clone();
    }
    let p = p.to_preds();
    map_pairs!(&on_true.elements, &on_false.elements, (x, y) => {
        p.iter().zip(x.iter().zip(y)).map(|(p, (x, y))| if *p { *x } else { *y }).collect()
    })
}

/// Computes min(high, max(low, operand)), as the specification defines it.
pub(super) fn clamp(low: &Array, a: &Array, high: &Array) -> Elements {
    let bound = |bound: &Array| match bound.ty.rank() {
        0 => bound.repeated(a.elements.len()),
        _ => bound.elements.clone(),
    };
    let raised = combine(Binary::Maximum, &bound(low), &a.elements, a.ty.dtype);
    combine(Binary::Minimum, &bound(high), &raised, a.ty.dtype)
}

/// Floats are rounded towards 0 and clamped to the range of the integer dtype; NaN becomes 0. Integers wrap to a
/// narrower dtype.
pub(crate) fn convert(a: &Array, dtype: Dtype) -> Elements {
    match (&a.elements, dtype) {
        (_, Dtype::Pred) => Elements::Pred(a.to_preds()),
        (Elements::Float(x), Dtype::I16) => Elements::Int(x.iter().map(|x| i64::from(*x as i16)).collect()),
        (Elements::Float(x), Dtype::I32) => Elements::Int(x.iter().map(|x| i64::from(*x as i32)).collect()),
        (Elements::Float(x), Dtype::U8) => Elements::Int(x.iter().map(|x| i64::from(*x as u8)).collect()),
        (Elements::Float(x), Dtype::U32) => Elements::Int(x.iter().map(|x| i64::from(*x as u32)).collect()),
        (_, dtype) if dtype.is_integer() => Elements::Int(a.to_ints().into_iter().map(|x| wrap(x, dtype)).collect()),
        _ => Elements::Float(a.to_floats()),
    }
}

/// Reinterprets the bits of the operand, after rounding it to its dtype.
pub(super) fn bitcast(a: &Array, dtype: Dtype) -> Elements {
    let bits = match &a.elements {
        Elements::Float(x) => x.iter().map(|x| float_bits(*x, a.ty.dtype)).collect(),
        _ => a.to_ints(),
    };
    match dtype.is_float() {
        true => Elements::Float(bits.into_iter().map(|bits| float_of(bits as u64, dtype)).collect()),
        false => Elements::Int(bits.into_iter().map(|bits| wrap(bits, dtype)).collect()),
    }
}

fn float_bits(x: f64, dtype: Dtype) -> i64 {
    match dtype {
        Dtype::F16 => half::f16::from_f64(x).to_bits().into(),
        Dtype::Bf16 => half::bf16::from_f64(x).to_bits().into(),
        Dtype::F32 => (x as f32).to_bits().into(),
        _ => x.to_bits() as i64,
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
    fn of_float(self, x: f64) -> f64 {
        match self {
            Self::Abs => x.abs(),
            Self::Negate => -x,
            Self::Sign => {
                if x == 0.0 || x.is_nan() {
                    x
                } else {
                    x.signum()
                }
            }
            Self::Exponential => x.exp(),
            Self::ExponentialMinusOne => x.exp_m1(),
            Self::Log => x.ln(),
            Self::LogPlusOne => x.ln_1p(),
            Self::Logistic => 1.0 / (1.0 + (-x).exp()),
            Self::Tanh => x.tanh(),
            Self::Sqrt => x.sqrt(),
            Self::Rsqrt => 1.0 / x.sqrt(),
            Self::Cosine => x.cos(),
            Self::Sine => x.sin(),
            Self::IsFinite | Self::Not => ill_typed("a result of floats"),
        }
    }

    fn of_int(self, x: i64) -> i64 {
        match self {
            Self::Abs => x.wrapping_abs(),
            Self::Negate => x.wrapping_neg(),
            Self::Sign => x.signum(),
            Self::Not => !x,
            _ => ill_typed("an operation on floats"),
        }
    }
}

impl Binary {
    fn of_floats(self) -> fn(f64, f64) -> f64 {
        match self {
            Self::Add => |a, b| a + b,
            Self::Subtract => |a, b| a - b,
            Self::Multiply => |a, b| a * b,
            Self::Divide => |a, b| a / b,
            Self::Maximum => |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) },
            Self::Minimum => |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) },
            _ => ill_typed("an operation on integers"),
        }
    }

    /// Returns the operation on integers of `dtype`. Where the specification leaves the result open, it follows XLA: x
    /// / 0 has all bits set.
    fn of_ints(self) -> fn(i64, i64, Dtype) -> i64 {
        match self {
            Self::Add => |a, b, dtype| wrap(a.wrapping_add(b), dtype),
            Self::Subtract => |a, b, dtype| wrap(a.wrapping_sub(b), dtype),
            Self::Multiply => |a, b, dtype| wrap(a.wrapping_mul(b), dtype),
            Self::Divide => |a, b, dtype| wrap(if b == 0 { -1 } else { a.wrapping_div(b) }, dtype),
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
                let signed = match dtype {
                    Dtype::U8 => i64::from(a as u8 as i8),
                    Dtype::U32 => wrap(a, Dtype::I32),
                    _ => a,
                };
                wrap(signed >> if (0..width(dtype)).contains(&b) { b } else { width(dtype) - 1 }, dtype)
            },
        }
    }

    /// Returns the operation on predicates, which act as one-bit integers: addition is or.
    fn of_preds(self) -> fn(bool, bool) -> bool {
        match self {
            Self::Add | Self::Or | Self::Maximum => |a, b| a | b,
            Self::And | Self::Minimum => |a, b| a & b,
            Self::Xor => |a, b| a ^ b,
            _ => ill_typed("an operation on numbers"),
        }
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
