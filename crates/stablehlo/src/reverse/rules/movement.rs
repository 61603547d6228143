//! Derivatives of operations that move elements to static positions.

use super::{Parts, Step};
use crate::graph::Reducer;

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
    vec![Some(ct.pad_general(&zero, &low, &high, &interior))]
}

pub(super) fn pad(step: &Step<'_>, low: &[i64], high: &[i64], interior: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    let rank = x.ty().rank();
    step.parts(|i| {
        if i == 0 {
            // The inverse: trimmed elements get zero, and interior padding is dropped.
            let negated = |sizes: &[i64]| sizes.iter().map(|s| -s).collect::<Vec<_>>();
            let zero = step.zero(ct.dtype());
            let whole = ct.pad_general(&zero, &negated(low), &negated(high), &vec![0; rank]);
            let stride: Vec<usize> = interior.iter().map(|i| i + 1).collect();
            return Some(whole.slice_strided(&vec![0; rank], whole.shape(), &stride));
        }
        let dtype = super::super::wide(ct.dtype());
        let one = step.builder.scalar(1.0, dtype);
        let added = step.zeros(&x.ty().with_dtype(dtype)).pad_general(&one, low, high, interior);
        Some((ct.convert(dtype) * added).reduce(Reducer::Add, &(0..rank).collect::<Vec<_>>()))
    })
}
