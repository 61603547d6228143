//! Products and reductions.

use super::array::{Array, Elements, ill_typed, joined, offsets, wrap};
use super::elementwise::combine;
use crate::graph::{DotDimensions, Reducer};
use crate::types::TensorType;

/// Returns the dimensions of a rank that are not in `used`.
pub(crate) fn rest(rank: usize, used: &[usize]) -> Vec<usize> {
    (0..rank).filter(|d| !used.contains(d)).collect()
}

/// Returns the number of products that each element of a dot product sums.
pub(super) fn terms(a: &TensorType, d: &DotDimensions) -> usize {
    d.contract.0.iter().fold(1, |n, d| n.saturating_mul(a.shape[*d]))
}

/// Computes a dot product: floats accumulate in f64, integers wrap.
pub(super) fn dot(a: &Array, b: &Array, d: &DotDimensions, ty: &TensorType) -> Elements {
    fn sums<T: Copy, S>(
        (a, left): (&[T], &[Vec<usize>; 3]),
        (b, right): (&[T], &[Vec<usize>; 3]),
        sum: impl Fn(&mut dyn Iterator<Item = (T, T)>) -> S,
    ) -> Vec<S> {
        let mut sums = vec![];
        for (x, y) in left[0].iter().zip(&right[0]) {
            for i in &left[1] {
                for j in &right[1] {
                    let terms = left[2].iter().zip(&right[2]);
                    sums.push(sum(&mut terms.map(|(k, l)| (a[x + i + k], b[y + j + l]))));
                }
            }
        }
        sums
    }
    if ty.elements() == 0 {
        return a.take(&[]);
    }
    // Offsets along batch, free and contracted dimensions.
    let side = |a: &Array, batch: &[usize], contract: &[usize]| {
        let free = rest(a.ty.rank(), &[batch, contract].concat());
        [batch, &free, contract].map(|dimensions| offsets(&a.ty.shape, dimensions))
    };
    let (left, right) = (side(a, &d.batch.0, &d.contract.0), side(b, &d.batch.1, &d.contract.1));
    match (&a.elements, &b.elements) {
        (Elements::Float(a), Elements::Float(b)) => {
            Elements::Float(sums((a, &left), (b, &right), |terms| terms.map(|(x, y)| x * y).sum()))
        }
        (Elements::Int(a), Elements::Int(b)) => Elements::Int(sums((a, &left), (b, &right), |terms| {
            terms.fold(0, |sum, (x, y)| wrap(x.wrapping_mul(y).wrapping_add(sum), ty.dtype))
        })),
        _ => ill_typed("numbers of one dtype"),
    }
}

/// Combines the initial value and all terms, in row-major order.
pub(super) fn reduce(a: &Array, init: &Array, reducer: Reducer, dimensions: &[usize], ty: &TensorType) -> Elements {
    let init = init.repeated(ty.elements());
    if ty.elements() == 0 {
        return init;
    }
    let kept = offsets(&a.ty.shape, &rest(a.ty.rank(), dimensions));
    offsets(&a.ty.shape, dimensions).iter().fold(init, |all, at| {
        let term = a.take(&kept.iter().map(|k| k + at).collect::<Vec<_>>());
        combine(reducer.binary(), &all, &term, ty.dtype)
    })
}

/// Returns the maximum along a dimension and its index, from `[values, indices]` and their initial values.
pub(super) fn arg_max([a, indices]: [&Array; 2], [first, first_index]: [&Array; 2], dimension: usize) -> Vec<Elements> {
    // The initial values are appended after the elements.
    let all = Array { ty: a.ty.clone(), elements: joined(&[&a.elements, &first.elements]) };
    let numbers = Array { ty: indices.ty.clone(), elements: joined(&[&indices.elements, &first_index.elements]) };
    let (kept, reduced) = (offsets(&a.ty.shape, &rest(a.ty.rank(), &[dimension])), offsets(&a.ty.shape, &[dimension]));
    fn largest<T: PartialOrd>(values: &[T], indices: &[i64], places: impl Iterator<Item = usize>) -> Option<usize> {
        // Only NaN is unordered with itself.
        let nan = |at: usize| values[at].partial_cmp(&values[at]).is_none();
        places.reduce(|best, at| {
            let more = values[at] > values[best] || (nan(at) && !nan(best));
            let same = values[at] == values[best] || (nan(at) && nan(best));
            if more || (same && indices[at] < indices[best]) { at } else { best }
        })
    }
    let (indices, end) = (numbers.integers(), a.elements.len());
    let places = kept.iter().filter_map(|k| {
        let places = std::iter::once(end).chain(reduced.iter().map(|r| k + r));
        match &all.elements {
            Elements::Float(values) => largest(values, indices, places),
            Elements::Int(values) => largest(values, indices, places),
            Elements::Pred(values) => largest(values, indices, places),
        }
    });
    let places: Vec<usize> = places.collect();
    vec![all.take(&places), numbers.take(&places)]
}
