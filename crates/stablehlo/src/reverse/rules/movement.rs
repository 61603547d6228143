//! Operations that move elements to places that are known.

use super::{Parts, Step};
use crate::build::Value;
use crate::graph::{Kind, Reducer};
use crate::types::TensorType;

pub(super) fn reshape(step: &Step<'_>) -> Parts {
    vec![Some(step.cotangent().reshape(step.operands[0].shape()))]
}

pub(super) fn transpose(step: &Step<'_>, permutation: &[usize]) -> Parts {
    let mut inverse = vec![0; permutation.len()];
    permutation.iter().enumerate().for_each(|(i, d)| inverse[*d] = i);
    vec![Some(step.cotangent().transpose(&inverse))]
}

pub(super) fn concatenate(step: &Step<'_>, dimension: usize) -> Parts {
    let ct = step.cotangent();
    step.parts(|i| {
        let before: usize = step.operands[..i].iter().map(|v| v.shape()[dimension]).sum();
        let mut start = vec![0; ct.ty().rank()];
        let mut limit = ct.shape().to_vec();
        start[dimension] = before;
        limit[dimension] = before + step.operands[i].shape()[dimension];
        Some(ct.slice(&start, &limit))
    })
}

pub(super) fn slice(step: &Step<'_>, start: &[usize], stride: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    let low: Vec<i64> = start.iter().map(|s| *s as i64).collect();
    let interior: Vec<usize> = stride.iter().map(|s| s - 1).collect();
    let high: Vec<i64> = (0..start.len())
        .map(|d| {
            let n = ct.shape()[d];
            let spaced = if n == 0 { 0 } else { (n - 1) * stride[d] + 1 };
            x.shape()[d] as i64 - low[d] - spaced as i64
        })
        .collect();
    let zero = step.zero(ct.dtype());
    vec![Some(padded(step, ct, &zero, &low, &high, &interior))]
}

pub(super) fn pad(step: &Step<'_>, low: &[i64], high: &[i64], interior: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    let rank = x.ty().rank();
    step.parts(|i| {
        if i == 0 {
            // The other way round: what was trimmed is zero, and what was added between is left out.
            let negated = |sizes: &[i64]| sizes.iter().map(|s| -s).collect::<Vec<_>>();
            let zero = step.zero(ct.dtype());
            let whole = padded(step, ct, &zero, &negated(low), &negated(high), &vec![0; rank]);
            let stride: Vec<usize> = interior.iter().map(|i| i + 1).collect();
            if stride.iter().all(|s| *s == 1) {
                return Some(whole);
            }
            let (start, limit) = (vec![0; rank], whole.shape().to_vec());
            return Some(step.emit(Kind::Slice { start, limit, stride }, &[&whole], x.ty().with_dtype(ct.dtype())));
        }
        let dtype = super::super::wide(ct.dtype());
        let one = step.builder.scalar(1.0, dtype);
        let added = padded(step, &step.zeros(&x.ty().with_dtype(dtype)), &one, low, high, interior);
        Some((ct.convert(dtype) * added).reduce(Reducer::Add, &(0..rank).collect::<Vec<_>>()))
    })
}

/// Copies of `value` before, after and between; negative ones trim.
pub(super) fn padded(
    step: &Step<'_>,
    x: &Value,
    value: &Value,
    low: &[i64],
    high: &[i64],
    interior: &[usize],
) -> Value {
    if low.iter().chain(high).all(|p| *p == 0) && interior.iter().all(|i| *i == 0) {
        return x.clone();
    }
    let size = |d: usize| {
        let n = x.shape()[d];
        let spaced = if n == 0 { 0 } else { (n - 1) * (interior[d] + 1) + 1 };
        usize::try_from(spaced as i64 + low[d] + high[d]).unwrap_or(0)
    };
    let ty = TensorType::new(x.dtype(), (0..x.ty().rank()).map(size).collect::<Vec<_>>());
    let kind = Kind::Pad { low: low.to_vec(), high: high.to_vec(), interior: interior.to_vec() };
    step.emit(kind, &[x, value], ty)
}

/// Cotangents stay together as the values did.
pub(super) fn optimization_barrier(step: &Step<'_>) -> Parts {
    let there: Vec<&Value> = step.cotangents.iter().flatten().collect();
    let mut barred = step.builder.optimization_barrier(&there).into_iter();
    step.cotangents.iter().map(|ct| ct.as_ref().and_then(|_| barred.next())).collect()
}
