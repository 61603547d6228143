//! Derivatives of element-wise operations.

use super::{Parts, Step};
use crate::build::Value;
use crate::graph::{Binary, Unary};

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
        Unary::Sign | Unary::IsFinite | Unary::Not => return vec![None],
    };
    vec![Some(part)]
}

pub(super) fn binary(step: &Step<'_>, operation: Binary) -> Parts {
    let (ct, a, b, y) = (step.cotangent(), &step.operands[0], &step.operands[1], &step.results[0]);
    step.parts(|i| match (operation, i) {
        (Binary::Add, _) | (Binary::Subtract, 0) => Some(ct.clone()),
        (Binary::Subtract, _) => Some(-ct),
        (Binary::Multiply, 0) => Some(ct * b),
        (Binary::Multiply, _) => Some(ct * a),
        (Binary::Divide, 0) => Some(ct / b),
        (Binary::Divide, _) => Some(-(ct * y / b)),
        (Binary::Maximum, _) => Some(ct * share(a, b, i == 0)),
        (Binary::Minimum, _) => Some(ct * share(b, a, i == 0)),
        // Of integers and predicates only, or without a rule.
        _ => None,
    })
}

/// Returns the derivative of max(a, b) with respect to a (or b): 1, 0, or 1/2 if they are equal.
fn share(a: &Value, b: &Value, with_respect_to_a: bool) -> Value {
    let (mine, other) = if with_respect_to_a { (a, b) } else { (b, a) };
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
