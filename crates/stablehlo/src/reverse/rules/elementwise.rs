//! Derivatives of element-wise operations.

use super::super::wide;
use super::{Parts, Step};
use crate::build::Value;
use crate::graph::{Binary, Reducer, Unary};

pub(super) fn unary(step: &Step<'_>, operation: Unary) -> Parts {
    let (ct, x, y) = (step.cotangent(), &step.operands[0], &step.results[0]);
    let part = match operation {
        Unary::Abs => ct * x.unary(Unary::Sign),
        Unary::Negate => -ct,
        Unary::Exponential => ct * y,
        Unary::ExponentialMinusOne => ct * (y + y.like(1.0)),
        Unary::Log => ct / x,
        Unary::LogPlusOne => ct / (x + x.like(1.0)),
        Unary::Logistic => ct * (y * (y.like(1.0) - y)),
        Unary::Tanh => ct * (y.like(1.0) - y * y),
        Unary::Sqrt => ct * y.like(0.5) / y,
        Unary::Rsqrt => ct * y.like(-0.5) * (y * y * y),
        Unary::Cosine => -(ct * x.unary(Unary::Sine)),
        Unary::Sine => ct * x.unary(Unary::Cosine),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::IsFinite | Unary::Not => return vec![None],
    };
    vec![Some(part)]
}

pub(super) fn binary(step: &Step<'_>, operation: Binary) -> Parts {
    let (ct, a, b, y) = (step.cotangent(), &step.operands[0], &step.operands[1], &step.results[0]);
    step.parts(|i| match (operation, i) {
        (Binary::Add, _) | (Binary::Subtract | Binary::Remainder, 0) => Some(ct.clone()),
        (Binary::Subtract, _) => Some(-ct),
        (Binary::Multiply, 0) => Some(ct * b),
        (Binary::Multiply, _) => Some(ct * a),
        (Binary::Divide, 0) => Some(ct / b),
        (Binary::Divide, _) => Some(-(ct * y / b)),
        (Binary::Remainder, _) => {
            // a - b * n, where n, the quotient rounded towards zero, has derivative 0.
            let quotient = a / b;
            Some(-(ct * (quotient.unary(Unary::Sign) * quotient.abs().unary(Unary::Floor))))
        }
        (Binary::Power, 0) => {
            // The derivative of x^0 is 0, also at 0.
            let slope = b * a.binary(Binary::Power, &(b - b.like(1.0)));
            Some(ct * b.eq(&b.like(0.0)).select(&b.like(0.0), &slope))
        }
        (Binary::Power, _) => {
            // The derivative of 0^b is 0 for b > 0.
            let slope = y * a.log();
            Some(ct * a.eq(&a.like(0.0)).select(&a.like(0.0), &slope))
        }
        (Binary::Maximum, _) => Some(ct * share(a, b, i == 0)),
        (Binary::Minimum, _) => Some(ct * share(b, a, i == 0)),
        (
            Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::ShiftLeft
            | Binary::ShiftRightLogical
            | Binary::ShiftRightArithmetic,
            _,
        ) => None,
    })
}

/// Returns the derivative of max(a, b) with respect to a (or b): 1, 0, or 1/2 if they are equal.
fn share(a: &Value, b: &Value, of_a: bool) -> Value {
    let (mine, other) = if of_a { (a, b) } else { (b, a) };
    let (none, half, all) = (a.like(0.0), a.like(0.5), a.like(1.0));
    mine.gt(other).select(&all, &mine.eq(other).select(&half, &none))
}

pub(super) fn select(step: &Step<'_>) -> Parts {
    let (ct, predicate) = (step.cotangent(), &step.operands[0]);
    let zeros = ct.like(0.0);
    step.parts(|i| match i {
        1 => Some(predicate.select(ct, &zeros)),
        2 => Some(predicate.select(&zeros, ct)),
        _ => None,
    })
}

/// The operand gets the cotangent within the bounds and at them; a bound gets it where it clamps the operand.
pub(super) fn clamp(step: &Step<'_>) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[1]);
    let whole = |bound: &Value| bound.broadcast_in_dim(x.shape(), &(0..bound.ty().rank()).collect::<Vec<_>>());
    let (low, high) = (whole(&step.operands[0]), whole(&step.operands[2]));
    let zeros = ct.like(0.0);
    // The upper bound wins if the lower bound is above it.
    let above = x.max(&low).gt(&high);
    let bound = |mask: Value, bound: &Value| {
        let part = mask.select(ct, &zeros);
        if bound.shape() == x.shape() {
            return part;
        }
        part.convert(wide(part.dtype())).reduce(Reducer::Add, &(0..x.ty().rank()).collect::<Vec<_>>())
    };
    step.parts(|i| match i {
        0 => Some(bound(x.lt(&low) & !&above, &step.operands[0])),
        1 => Some((x.ge(&low) & !&above).select(ct, &zeros)),
        _ => Some(bound(above.clone(), &step.operands[2])),
    })
}
