//! Operations that move elements.

use super::array::{Array, Elements, each_index, joined, place, strides, wrap};
use crate::types::TensorType;

/// Moves elements of `a` to the result; `from` maps an index of the result to an index of `a`.
fn moved(a: &Array, ty: &TensorType, mut from: impl FnMut(&[usize], &mut [usize])) -> Elements {
    let distances = strides(&a.ty.shape);
    let mut source = vec![0; a.ty.rank()];
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        from(index, &mut source);
        places.push(place(&source, &distances));
    });
    a.take(&places)
}

pub(crate) fn iota(dimension: usize, ty: &TensorType) -> Elements {
    let mut numbers = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| numbers.push(index[dimension]));
    if ty.dtype.is_float() {
        Elements::Float(numbers.into_iter().map(|i| i as f64).collect())
    } else {
        Elements::Int(numbers.into_iter().map(|i| wrap(i as i64, ty.dtype)).collect())
    }
}

pub(crate) fn broadcast(a: &Array, dimensions: &[usize], ty: &TensorType) -> Elements {
    moved(a, ty, |index, source| {
        for ((i, d), size) in source.iter_mut().zip(dimensions).zip(&a.ty.shape) {
            *i = if *size == 1 { 0 } else { index[*d] };
        }
    })
}

pub(crate) fn transpose(a: &Array, permutation: &[usize], ty: &TensorType) -> Elements {
    moved(a, ty, |index, source| permutation.iter().zip(index).for_each(|(d, i)| source[*d] = *i))
}

pub(super) fn concatenate(operands: &[&Array], dimension: usize, ty: &TensorType) -> Elements {
    let all = joined(&operands.iter().map(|a| &a.elements).collect::<Vec<_>>());
    if ty.elements() == 0 {
        return all;
    }
    let rows: usize = ty.shape[..dimension].iter().product();
    let mut places = Vec::with_capacity(all.len());
    for row in 0..rows {
        let mut begin = 0;
        for a in operands {
            let count = a.elements.len() / rows;
            places.extend(begin + row * count..begin + (row + 1) * count);
            begin += a.elements.len();
        }
    }
    Array { ty: ty.clone(), elements: all }.take(&places)
}

/// Returns the window of the result's size that begins at `start`.
pub(crate) fn slice(a: &Array, start: &[usize], ty: &TensorType) -> Elements {
    moved(a, ty, |index, source| (0..start.len()).for_each(|d| source[d] = start[d] + index[d]))
}

/// Returns the start of a window of `sizes`, clamped so that the window fits into `shape`.
fn held(starts: &[&Array], shape: &[usize], sizes: &[usize]) -> Vec<usize> {
    let one = |((start, size), window): ((&&Array, &usize), &usize)| {
        start.integers()[0].clamp(0, i64::try_from(size - window).unwrap_or(i64::MAX)) as usize
    };
    starts.iter().zip(shape).zip(sizes).map(one).collect()
}

pub(super) fn dynamic_slice(a: &Array, starts: &[&Array], ty: &TensorType) -> Elements {
    slice(a, &held(starts, &a.ty.shape, &ty.shape), ty)
}

pub(super) fn dynamic_update_slice(a: &Array, update: &Array, starts: &[&Array]) -> Elements {
    let begin = held(starts, &a.ty.shape, &update.ty.shape);
    let distances = strides(&a.ty.shape);
    let first = place(&begin, &distances);
    let mut places: Vec<usize> = (0..a.ty.elements()).collect();
    let mut next = a.ty.elements();
    each_index(&update.ty.shape, |index| {
        places[first + place(index, &distances)] = next;
        next += 1;
    });
    Array { ty: a.ty.clone(), elements: joined(&[&a.elements, &update.elements]) }.take(&places)
}

pub(super) fn pad(a: &Array, value: &Array, low: &[usize], ty: &TensorType) -> Elements {
    let distances = strides(&a.ty.shape);
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        let inside = (0..low.len()).try_fold(0, |at, d| {
            let i = index[d].checked_sub(low[d]).filter(|i| *i < a.ty.shape[d])?;
            Some(at + i * distances[d])
        });
        places.push(inside.unwrap_or(a.elements.len()));
    });
    Array { ty: ty.clone(), elements: joined(&[&a.elements, &value.elements]) }.take(&places)
}
