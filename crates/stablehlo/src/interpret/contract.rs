//! Products, reductions and sorts.

use super::Fault;
use super::array::{Array, Elements, joined, offsets, wrap};
use super::elementwise::combine;
use super::shape::within;
use crate::graph::{DotDimensions, Order, Reducer};
use crate::types::TensorType;
use std::cmp::Ordering;

type Outcome = Result<Elements, Fault>;

/// Returns the dimensions of a rank that are not in `used`.
fn rest(rank: usize, used: &[usize]) -> Vec<usize> {
    (0..rank).filter(|d| !used.contains(d)).collect()
}

fn sizes(ty: &TensorType, dimensions: &[usize]) -> Vec<usize> {
    dimensions.iter().map(|d| ty.shape[*d]).collect()
}

/// A dot product: the offsets of its terms and the sizes of its result.
pub(super) struct Product {
    left: [Vec<usize>; 3],
    right: [Vec<usize>; 3],
    /// The number of terms that each element of the result sums.
    pub(super) terms: usize,
}

impl Product {
    pub(super) fn new(a: &TensorType, b: &TensorType, d: &DotDimensions, ty: &TensorType) -> Result<Self, Fault> {
        let side = |ty: &TensorType, batch: &[usize], contract: &[usize]| {
            let used = [batch, contract].concat();
            within(&used, ty.rank())?;
            Ok([batch.to_vec(), rest(ty.rank(), &used), contract.to_vec()])
        };
        let (left, right) = (side(a, &d.batch.0, &d.contract.0)?, side(b, &d.batch.1, &d.contract.1)?);
        let of = |i: usize| (sizes(a, &left[i]), sizes(b, &right[i]));
        let (batch, free, contract) = (of(0), of(1), of(2));
        let shape = [batch.0.clone(), free.0, free.1].concat();
        if batch.0 != batch.1 || contract.0 != contract.1 || shape != ty.shape {
            return Err(Fault::malformed(format!("the product of {a} and {b} by {d:?} is no {ty}")));
        }
        let terms = contract.0.iter().fold(1_usize, |n, size| n.saturating_mul(*size));
        Ok(Self { left, right, terms })
    }

    /// Computes the sums of products: floats accumulate in f64, integers wrap.
    pub(super) fn of(&self, a: &Array, b: &Array, ty: &TensorType) -> Outcome {
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
            return Ok(a.take(&[]));
        }
        let left = [0, 1, 2].map(|i| offsets(&a.ty.shape, &self.left[i]));
        let right = [0, 1, 2].map(|i| offsets(&b.ty.shape, &self.right[i]));
        match (&a.elements, &b.elements) {
            (Elements::Float(a), Elements::Float(b)) => {
                Ok(Elements::Float(sums((a, &left), (b, &right), |terms| terms.map(|(x, y)| x * y).sum())))
            }
            (Elements::Int(a), Elements::Int(b)) => Ok(Elements::Int(sums((a, &left), (b, &right), |terms| {
                terms.fold(0, |sum, (x, y)| wrap(x.wrapping_mul(y).wrapping_add(sum), ty.dtype))
            }))),
            _ => Err(Fault::malformed(format!("numbers of one dtype expected, got {} and {}", a.ty, b.ty))),
        }
    }
}

/// Combines the initial value and all terms from left to right.
fn fold(init: Elements, terms: impl Iterator<Item = Elements>, reducer: Reducer, ty: &TensorType) -> Outcome {
    let mut terms = terms;
    terms.try_fold(init, |all, term| combine(reducer.binary(), &all, &term, ty.dtype))
}

pub(super) fn reduce(a: &Array, init: &Array, reducer: Reducer, dimensions: &[usize], ty: &TensorType) -> Outcome {
    within(dimensions, a.ty.rank())?;
    let kept = rest(a.ty.rank(), dimensions);
    if sizes(&a.ty, &kept) != ty.shape || a.ty.dtype != ty.dtype {
        return Err(Fault::malformed(format!("{} reduced over {dimensions:?} is no {ty}", a.ty)));
    }
    let init = init.repeated(ty.elements())?;
    if ty.elements() == 0 {
        return Ok(init);
    }
    let (kept, reduced) = (offsets(&a.ty.shape, &kept), offsets(&a.ty.shape, dimensions));
    let term = |at: &usize| a.take(&kept.iter().map(|k| k + at).collect::<Vec<_>>());
    fold(init, reduced.iter().map(term), reducer, ty)
}

/// Returns the maximum along a dimension and its index, from `[values, indices]` and their initial values.
pub(super) fn arg_max(
    [a, indices]: [&Array; 2],
    [first, first_index]: [&Array; 2],
    dimension: usize,
) -> Result<Vec<Elements>, Fault> {
    within(&[dimension], a.ty.rank())?;
    if a.ty.shape != indices.ty.shape {
        return Err(Fault::malformed(format!("indices of {} expected, got {}", a.ty, indices.ty)));
    }
    // The initial values are appended after the elements.
    let all = Array { ty: a.ty.clone(), elements: joined(&[&a.elements, &first.repeated(1)?])? };
    let numbers = Array { ty: indices.ty.clone(), elements: joined(&[&indices.elements, &first_index.repeated(1)?])? };
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
    let (Elements::Int(indices), end) = (&numbers.elements, a.elements.len()) else {
        return Err(Fault::malformed(format!("indices expected, got {}", numbers.ty)));
    };
    let places = kept.iter().filter_map(|k| {
        let places = std::iter::once(end).chain(reduced.iter().map(|r| k + r));
        match &all.elements {
            Elements::Float(values) => largest(values, indices, places),
            Elements::Int(values) => largest(values, indices, places),
            Elements::Pred(values) => largest(values, indices, places),
        }
    });
    let places: Vec<usize> = places.collect();
    Ok(vec![all.take(&places), numbers.take(&places)])
}

/// Returns the offsets of the elements in sorted order of the first operand; all operands are permuted by them.
pub(super) fn sorted(keys: &Array, dimension: usize, order: Order) -> Result<Vec<usize>, Fault> {
    within(&[dimension], keys.ty.rank())?;
    let shape = &keys.ty.shape;
    let mut places = vec![0; keys.elements.len()];
    if places.is_empty() {
        return Ok(places);
    }
    fn ordering(keys: &Elements, a: usize, b: usize) -> Ordering {
        match keys {
            Elements::Float(x) => x[a].total_cmp(&x[b]),
            Elements::Int(x) => x[a].cmp(&x[b]),
            Elements::Pred(x) => x[a].cmp(&x[b]),
        }
    }
    let lines = offsets(shape, &rest(shape.len(), &[dimension]));
    let along = offsets(shape, &[dimension]);
    for line in lines {
        let targets: Vec<usize> = along.iter().map(|at| line + at).collect();
        let mut sources = targets.clone();
        sources.sort_by(|a, b| {
            let ascending = ordering(&keys.elements, *a, *b);
            match order {
                Order::Ascending => ascending,
                Order::Descending => ascending.reverse(),
            }
        });
        targets.iter().zip(sources).for_each(|(target, source)| places[*target] = source);
    }
    Ok(places)
}
