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

pub(super) fn slice(step: &Step<'_>, start: &[usize], limit: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    let high: Vec<usize> = x.shape().iter().zip(limit).map(|(size, limit)| size - limit).collect();
    vec![Some(ct.pad(&step.zero(ct.dtype()), start, &high))]
}

pub(super) fn pad(step: &Step<'_>, low: &[usize], high: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    step.parts(|i| {
        if i == 0 {
            let limit: Vec<usize> = low.iter().zip(x.shape()).map(|(low, size)| low + size).collect();
            return Some(ct.slice(low, &limit));
        }
        let dtype = super::super::wide(ct.dtype());
        let added = step.zeros(&x.ty().with_dtype(dtype)).pad(&step.builder.scalar(1.0, dtype), low, high);
        Some((ct.convert(dtype) * added).reduce(Reducer::Add, &(0..x.ty().rank()).collect::<Vec<_>>()))
    })
}
