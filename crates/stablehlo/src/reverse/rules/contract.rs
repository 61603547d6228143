//! Derivatives of products, reductions and broadcasts.

use super::super::wide;
use super::{Parts, Step};
use crate::build::Value;
use crate::graph::{DotDimensions, Precision, Reducer};
use crate::types::Dtype;

pub(super) fn dot_general(step: &Step<'_>, dimensions: &DotDimensions, precision: Precision) -> Parts {
    let rest = |value: &Value, batch: &[usize], contract: &[usize]| {
        (0..value.ty().rank()).filter(|d| !batch.contains(d) && !contract.contains(d)).collect::<Vec<_>>()
    };
    let DotDimensions { batch, contract } = dimensions;
    let [a, b] = [&step.operands[0], &step.operands[1]];
    let (free_a, free_b) = (rest(a, &batch.0, &contract.0), rest(b, &batch.1, &contract.1));
    let n = batch.0.len();
    // The result has the batch dimensions, then the free dimensions of the left and of the right operand.
    let in_result = |offset: usize, free: &[usize]| (n + offset..n + offset + free.len()).collect::<Vec<_>>();
    let (rest_a, rest_b) = (in_result(0, &free_a), in_result(free_a.len(), &free_b));
    let sides = |i: usize| Side {
        mine: [a, b][i],
        batch: [&batch.0, &batch.1][i],
        free: [&free_a, &free_b][i],
        contract: [&contract.0, &contract.1][i],
    };
    step.parts(|i| {
        let other_in_result = if i == 0 { &rest_b } else { &rest_a };
        Some(transposed(step, precision, &sides(i), &sides(1 - i), other_in_result, i))
    })
}

/// An operand of a product with its dimensions.
struct Side<'a> {
    mine: &'a Value,
    batch: &'a [usize],
    free: &'a [usize],
    contract: &'a [usize],
}

/// Returns the cotangent of one operand: the result's cotangent times the other operand, summed over the other
/// operand's free dimensions.
fn transposed(
    step: &Step<'_>,
    precision: Precision,
    side: &Side<'_>,
    other: &Side<'_>,
    other_in_result: &[usize],
    index: usize,
) -> Value {
    let ct = step.cotangent();
    let (ct, factor) = match (ct.dtype(), other.mine.dtype()) {
        (ct_dtype, other_dtype) if ct_dtype == other_dtype => (ct.clone(), other.mine.clone()),
        // Devices round f32 operands to bf16 anyway. f16 has a smaller range, so it is excluded.
        (_, Dtype::Bf16) if precision == Precision::Default => (ct.convert(Dtype::Bf16), other.mine.clone()),
        (ct_dtype, _) => (ct.clone(), other.mine.convert(ct_dtype)),
    };
    let requested = step.sums[index];
    let dtype = if requested.bytes() < ct.dtype().bytes() { ct.dtype() } else { requested };
    let in_result: Vec<usize> = (0..side.batch.len()).collect();

    // The other operand's remaining dimensions are the contracted ones, in its order.
    let mut pairs: Vec<(usize, usize)> = other.contract.iter().copied().zip(side.contract.iter().copied()).collect();
    pairs.sort_unstable();
    let summed = pairs.into_iter().map(|(_, mine)| mine);
    let ct_first: Vec<usize> = side.batch.iter().chain(side.free).copied().chain(summed.clone()).collect();
    let ct_last: Vec<usize> = side.batch.iter().copied().chain(summed).chain(side.free.iter().copied()).collect();
    let in_order = |order: &[usize]| order.iter().enumerate().all(|(i, d)| i == *d);

    let dimensions = DotDimensions {
        batch: (in_result, other.batch.to_vec()),
        contract: (other_in_result.to_vec(), other.free.to_vec()),
    };
    // Prefer the operand order whose result needs no transpose.
    let (product, order) = if in_order(&ct_last) && !in_order(&ct_first) {
        let flipped = |(a, b): (Vec<usize>, Vec<usize>)| (b, a);
        let dimensions = DotDimensions { batch: flipped(dimensions.batch), contract: flipped(dimensions.contract) };
        (factor.dot_general(&ct, dimensions, dtype, precision), ct_last)
    } else {
        (ct.dot_general(&factor, dimensions, dtype, precision), ct_first)
    };
    if in_order(&order) {
        return product;
    }
    let mut permutation = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, d)| permutation[*d] = i);
    product.transpose(&permutation)
}

pub(super) fn reduce(step: &Step<'_>, reducers: &[Reducer], dimensions: &[usize]) -> Parts {
    let n = reducers.len();
    step.parts(|i| {
        let (ct, reducer) = (step.cotangents[i % n].as_ref()?, reducers[i % n]);
        if i >= n {
            // The initial value of a sum is one more summand; initial values of other reductions are constants.
            return (reducer == Reducer::Add).then(|| total(ct, &(0..ct.ty().rank()).collect::<Vec<_>>()));
        }
        let (x, y) = (&step.operands[i], &step.results[i]);
        let spread = |v: &Value| spread(v, x, dimensions);
        match reducer {
            Reducer::Add => Some(spread(ct)),
            Reducer::Max | Reducer::Min => {
                let dtype = wide(x.dtype());
                let (none, all) = (x.like(0.0).convert(dtype), x.like(1.0).convert(dtype));
                let hit = x.eq(&spread(y)).select(&all, &none);
                let hits = hit.reduce(Reducer::Add, dimensions);
                Some(hit * spread(&(ct.convert(dtype) / hits)))
            }
            Reducer::And | Reducer::Or => None,
        }
    })
}

/// Repeats a value along the reduced `dimensions` of `x`.
fn spread(value: &Value, x: &Value, dimensions: &[usize]) -> Value {
    let kept: Vec<usize> = (0..x.ty().rank()).filter(|d| !dimensions.contains(d)).collect();
    value.broadcast_in_dim(x.shape(), &kept)
}

/// The cotangent goes to the position of the maximum.
pub(super) fn arg_max(step: &Step<'_>, dimension: usize) -> Parts {
    step.parts(|i| {
        let ct = step.cotangents[0].as_ref().filter(|_| i == 0)?;
        let (x, indices) = (&step.operands[0], &step.operands[1]);
        let spread = |v: &Value| spread(v, x, &[dimension]);
        Some(indices.eq(&spread(&step.results[1])).select(&spread(ct), &x.like(0.0)))
    })
}

/// Sums over dimensions, at least in f32.
fn total(value: &Value, dimensions: &[usize]) -> Value {
    if dimensions.is_empty() {
        return value.clone();
    }
    value.convert(wide(value.dtype())).reduce(Reducer::Add, dimensions)
}

pub(super) fn broadcast_in_dim(step: &Step<'_>, dimensions: &[usize]) -> Parts {
    let (ct, x) = (step.cotangent(), &step.operands[0]);
    let repeated = |d: &usize| match dimensions.iter().position(|of| of == d) {
        Some(own) => x.shape()[own] != ct.shape()[*d],
        None => true,
    };
    let over: Vec<usize> = (0..ct.ty().rank()).filter(repeated).collect();
    vec![Some(total(ct, &over).reshape(x.shape()))]
}
