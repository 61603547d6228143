//! Operations that move elements.

use super::Fault;
use super::array::{Array, Elements, each_index, joined, place, strides, wrap};
use crate::types::{Dtype, TensorType};

type Outcome = Result<Elements, Fault>;

/// Moves elements of `a` to the result; `from` maps an index of the result to an index of `a`.
fn moved(a: &Array, ty: &TensorType, mut from: impl FnMut(&[usize], &mut [usize])) -> Outcome {
    let distances = strides(&a.ty.shape);
    let mut source = vec![0; a.ty.rank()];
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        from(index, &mut source);
        if source.iter().zip(&a.ty.shape).any(|(i, size)| i >= size) {
            return Err(Fault::malformed(format!("{source:?} is outside of {}", a.ty)));
        }
        places.push(place(&source, &distances));
        Ok(())
    })?;
    Ok(a.take(&places))
}

fn expect(legal: bool, reason: impl FnOnce() -> String) -> Result<(), Fault> {
    if legal { Ok(()) } else { Err(Fault::malformed(reason())) }
}

/// Checks that dimensions are distinct and below the rank.
pub(super) fn within(dimensions: &[usize], rank: usize) -> Result<(), Fault> {
    let legal = dimensions.iter().enumerate().all(|(i, d)| *d < rank && !dimensions[..i].contains(d));
    expect(legal, || format!("distinct dimensions below {rank} expected, got {dimensions:?}"))
}

pub(super) fn iota(dimension: usize, ty: &TensorType) -> Outcome {
    within(&[dimension], ty.rank())?;
    expect(ty.dtype != Dtype::Pred, || "numbers expected, got predicates".into())?;
    let mut numbers = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        numbers.push(index[dimension]);
        Ok::<(), Fault>(())
    })?;
    Ok(if ty.dtype.is_float() {
        Elements::Float(numbers.into_iter().map(|i| i as f64).collect())
    } else {
        Elements::Int(numbers.into_iter().map(|i| wrap(i as i64, ty.dtype)).collect())
    })
}

pub(super) fn broadcast(a: &Array, dimensions: &[usize], ty: &TensorType) -> Outcome {
    within(dimensions, ty.rank())?;
    let fits = dimensions.len() == a.ty.rank()
        && dimensions.iter().zip(&a.ty.shape).all(|(d, size)| *size == 1 || *size == ty.shape[*d]);
    expect(fits, || format!("{} does not fit into {ty} at dimensions {dimensions:?}", a.ty))?;
    moved(a, ty, |index, source| {
        for ((i, d), size) in source.iter_mut().zip(dimensions).zip(&a.ty.shape) {
            *i = if *size == 1 { 0 } else { index[*d] };
        }
    })
}

pub(super) fn reshape(a: &Array, ty: &TensorType) -> Outcome {
    expect(a.elements.len() == ty.elements(), || format!("{} has not as many elements as {ty}", a.ty))?;
    Ok(a.elements.clone())
}

pub(super) fn transpose(a: &Array, permutation: &[usize], ty: &TensorType) -> Outcome {
    within(permutation, a.ty.rank())?;
    let fits = permutation.len() == a.ty.rank()
        && ty.rank() == a.ty.rank()
        && permutation.iter().zip(&ty.shape).all(|(d, size)| a.ty.shape[*d] == *size);
    expect(fits, || format!("{} permuted by {permutation:?} is no {ty}", a.ty))?;
    moved(a, ty, |index, source| permutation.iter().zip(index).for_each(|(d, i)| source[*d] = *i))
}

pub(super) fn concatenate(operands: &[&Array], dimension: usize, ty: &TensorType) -> Outcome {
    within(&[dimension], ty.rank())?;
    let mut length = 0_usize;
    for a in operands {
        let fits = a.ty.rank() == ty.rank()
            && (0..ty.rank()).all(|d| d == dimension || a.ty.shape[d] == ty.shape[d])
            && a.ty.dtype == ty.dtype;
        expect(fits, || format!("{} is no part of {ty} along dimension {dimension}", a.ty))?;
        length = length.saturating_add(a.ty.shape[dimension]);
    }
    expect(length == ty.shape[dimension], || format!("{length} along dimension {dimension} of {ty}"))?;
    let all = joined(&operands.iter().map(|a| &a.elements).collect::<Vec<_>>())?;
    if ty.elements() == 0 {
        return Ok(all);
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
    Ok(Array { ty: ty.clone(), elements: all }.take(&places))
}

pub(super) fn slice(a: &Array, start: &[usize], limit: &[usize], stride: &[usize], ty: &TensorType) -> Outcome {
    let rank = a.ty.rank();
    let fits = [start.len(), limit.len(), stride.len(), ty.rank()] == [rank; 4]
        && (0..rank).all(|d| {
            start[d] <= limit[d]
                && limit[d] <= a.ty.shape[d]
                && stride[d] > 0
                && (limit[d] - start[d]).div_ceil(stride[d]) == ty.shape[d]
        });
    expect(fits, || format!("{start:?}..{limit:?} by {stride:?} of {} is no {ty}", a.ty))?;
    moved(a, ty, |index, source| (0..rank).for_each(|d| source[d] = start[d] + index[d] * stride[d]))
}

/// Returns the start of a window of `sizes`, clamped so that the window fits into `shape`.
fn held(starts: &[&Array], shape: &[usize], sizes: &[usize]) -> Result<Vec<usize>, Fault> {
    let legal = [starts.len(), sizes.len()] == [shape.len(); 2] && sizes.iter().zip(shape).all(|(s, size)| s <= size);
    expect(legal, || format!("a window of {shape:?} expected, got {sizes:?} at {} indices", starts.len()))?;
    let one = |((start, size), window): ((&&Array, &usize), &usize)| match start.integers()? {
        [at] => Ok((*at).clamp(0, i64::try_from(size - window).unwrap_or(i64::MAX)) as usize),
        _ => Err(Fault::malformed(format!("an integer scalar expected, got {}", start.ty))),
    };
    starts.iter().zip(shape).zip(sizes).map(one).collect()
}

pub(super) fn dynamic_slice(a: &Array, starts: &[&Array], sizes: &[usize], ty: &TensorType) -> Outcome {
    let begin = held(starts, &a.ty.shape, sizes)?;
    expect(ty.shape == sizes, || format!("a result of {sizes:?} expected, got {ty}"))?;
    moved(a, ty, |index, source| (0..begin.len()).for_each(|d| source[d] = begin[d] + index[d]))
}

pub(super) fn dynamic_update_slice(a: &Array, update: &Array, starts: &[&Array], ty: &TensorType) -> Outcome {
    let begin = held(starts, &a.ty.shape, &update.ty.shape)?;
    expect(a.ty == *ty, || format!("a result of {} expected, got {ty}", a.ty))?;
    let both = joined(&[&a.elements, &update.elements])?;
    let distances = strides(&ty.shape);
    let mut places: Vec<usize> = (0..ty.elements()).collect();
    let mut next = ty.elements();
    each_index(&update.ty.shape, |index| {
        let at: usize = index.iter().zip(&begin).zip(&distances).map(|((i, b), s)| (i + b) * s).sum();
        places[at] = next;
        next += 1;
        Ok::<(), Fault>(())
    })?;
    Ok(Array { ty: ty.clone(), elements: both }.take(&places))
}

pub(super) fn pad(a: &Array, value: &Array, low: &[i64], high: &[i64], interior: &[usize], ty: &TensorType) -> Outcome {
    let rank = a.ty.rank();
    let wide = |n: usize| i128::try_from(n).unwrap_or(i128::MAX);
    let size = |d: usize| {
        let between = (wide(a.ty.shape[d]) - 1).max(0).saturating_mul(wide(interior[d]));
        between.saturating_add(wide(a.ty.shape[d]) + i128::from(low[d]) + i128::from(high[d]))
    };
    let fits = [low.len(), high.len(), interior.len(), ty.rank()] == [rank; 4]
        && (0..rank).all(|d| size(d) == wide(ty.shape[d]));
    expect(fits, || format!("{} with {low:?}, {high:?} around and {interior:?} between is no {ty}", a.ty))?;
    let both = joined(&[&a.elements, &value.repeated(1)?])?;
    let distances = strides(&a.ty.shape);
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        let inside = (0..rank).try_fold(0, |at, d| {
            let (position, step) = (wide(index[d]) - i128::from(low[d]), wide(interior[d]) + 1);
            let i = usize::try_from(position / step).ok()?;
            (position >= 0 && position % step == 0 && i < a.ty.shape[d]).then(|| at + i * distances[d])
        });
        places.push(inside.unwrap_or(a.elements.len()));
        Ok::<(), Fault>(())
    })?;
    Ok(Array { ty: ty.clone(), elements: both }.take(&places))
}
