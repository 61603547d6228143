//! Gathers and scatters.

use super::Fault;
use super::array::{Array, Elements, each_index, place, strides};
use super::elementwise::combine;
use super::shape::within;
use crate::graph::{GatherDimensions, Reducer, ScatterDimensions};
use crate::types::TensorType;

type Outcome = Result<Elements, Fault>;

/// The common part of gathers and scatters: maps an index of the windows' tensor (the result of a gather, the updates
/// of a scatter) to a window of the operand, and to an offset in the window.
struct Windows<'a> {
    /// The dimensions of the windows' tensor that are inside of a window; `outer` has all others.
    inner: &'a [usize],
    outer: Vec<usize>,
    /// The operand's dimensions that windows have; `batching` has the batch dimensions of the operand and of the
    /// indices.
    kept: Vec<usize>,
    batching: (&'a [usize], &'a [usize]),
    /// The operand's dimension for each entry of an index vector.
    map: &'a [usize],
    vector: usize,
    indices: &'a [i64],
    index_type: &'a TensorType,
    rank: usize,
}

impl<'a> Windows<'a> {
    /// `dropped` are the operand's dimensions that windows do not have; `ty` is the type of the windows' tensor.
    fn new(
        operand: &TensorType,
        indices: &'a Array,
        ty: &TensorType,
        (inner, dropped, map, vector): (&'a [usize], &[usize], &'a [usize], usize),
        batching: (&'a [usize], &'a [usize]),
    ) -> Result<Self, Fault> {
        let (rank, index_rank) = (operand.rank(), indices.ty.rank());
        within(inner, ty.rank())?;
        within(map, rank)?;
        within(&[dropped, batching.0].concat(), rank)?;
        within(batching.1, index_rank)?;
        let kept: Vec<usize> = (0..rank).filter(|d| !dropped.contains(d) && !batching.0.contains(d)).collect();
        let outer: Vec<usize> = (0..ty.rank()).filter(|d| !inner.contains(d)).collect();
        // Index vectors of one entry need no dimension of their own.
        let entries = if vector == index_rank { Some(&1) } else { indices.ty.shape.get(vector) };
        let batch: Vec<usize> = (0..index_rank).filter(|d| *d != vector).map(|d| indices.ty.shape[d]).collect();
        let found: Vec<usize> = outer.iter().map(|d| ty.shape[*d]).collect();
        let fits = kept.len() == inner.len()
            && entries == Some(&map.len())
            && batch == found
            && batching.0.len() == batching.1.len()
            && !batching.1.contains(&vector)
            && inner.is_sorted();
        if !fits {
            let index_type = &indices.ty;
            let reason = format!("dimension numbers that fit {operand}, indices {index_type} and {ty} expected");
            return Err(Fault::malformed(reason));
        }
        let (indices, index_type) = (indices.integers()?, &indices.ty);
        Ok(Self { inner, outer, kept, batching, map, vector, indices, index_type, rank })
    }

    /// Returns the start of the window at `index` in the operand, from its index vector.
    fn start(&self, index: &[usize]) -> Vec<i64> {
        let mut at: Vec<usize> = self.outer.iter().map(|d| index[*d]).collect();
        let mut start = vec![0; self.rank];
        // The dimension of the index vector's entries.
        if self.vector < self.index_type.rank() {
            at.insert(self.vector, 0);
        }
        let distances = strides(&self.index_type.shape);
        let first = place(&at, &distances);
        let step = distances.get(self.vector).copied().unwrap_or(0);
        self.map.iter().enumerate().for_each(|(i, d)| start[*d] = self.indices[first + i * step]);
        start
    }

    /// Returns the offset from the start: the position in the window, and the batch index.
    fn offset(&self, index: &[usize]) -> Vec<usize> {
        let mut offset = vec![0; self.rank];
        self.kept.iter().zip(self.inner).for_each(|(d, i)| offset[*d] = index[*i]);
        for (d, i) in self.batching.0.iter().zip(self.batching.1) {
            let i = if *i < self.vector { *i } else { i - 1 };
            offset[*d] = index[self.outer[i]];
        }
        offset
    }
}

/// The start of each window is clamped so that the window fits into the operand.
pub(super) fn gather(a: &Array, indices: &Array, d: &GatherDimensions, ty: &TensorType) -> Outcome {
    let dimensions = (&d.offset_dims[..], &d.collapsed_slice_dims[..], &d.start_index_map[..], d.index_vector_dim);
    let batching = (&d.operand_batching_dims[..], &d.start_indices_batching_dims[..]);
    let windows = Windows::new(&a.ty, indices, ty, dimensions, batching)?;
    let sizes: Vec<usize> = windows.inner.iter().map(|d| ty.shape[*d]).collect();
    let fits = d.slice_sizes.len() == a.ty.rank()
        && d.slice_sizes.iter().zip(&a.ty.shape).all(|(window, size)| window <= size)
        && windows.kept.iter().map(|k| d.slice_sizes[*k]).eq(sizes.iter().copied());
    if !fits || a.ty.dtype != ty.dtype {
        return Err(Fault::malformed(format!("windows of {:?} of {} are no {ty}", d.slice_sizes, a.ty)));
    }
    let distances = strides(&a.ty.shape);
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        let (start, offset) = (windows.start(index), windows.offset(index));
        let mut at = 0;
        for k in 0..a.ty.rank() {
            let room = i64::try_from(a.ty.shape[k] - d.slice_sizes[k]).unwrap_or(i64::MAX);
            let i = start[k].clamp(0, room) as usize + offset[k];
            if i >= a.ty.shape[k] {
                return Err(Fault::malformed(format!("{i} along dimension {k} of {}", a.ty)));
            }
            at += i * distances[k];
        }
        places.push(at);
        Ok(())
    })?;
    Ok(a.take(&places))
}

/// Combines updates in row-major order and skips windows outside of the operand. A window that is partly outside is an
/// error: the specification updates the part inside, but compilers skip the whole window.
pub(super) fn scatter(
    a: &Array,
    indices: &Array,
    updates: &Array,
    d: &ScatterDimensions,
    reducer: Reducer,
    ty: &TensorType,
) -> Outcome {
    let dimensions = (
        &d.update_window_dims[..],
        &d.inserted_window_dims[..],
        &d.scatter_dims_to_operand_dims[..],
        d.index_vector_dim,
    );
    let batching = (&d.input_batching_dims[..], &d.scatter_indices_batching_dims[..]);
    let windows = Windows::new(&a.ty, indices, &updates.ty, dimensions, batching)?;
    let window = |(k, i): (&usize, &usize)| updates.ty.shape[*i] <= a.ty.shape[*k];
    if !windows.kept.iter().zip(windows.inner).all(window) || a.ty != *ty || updates.ty.dtype != ty.dtype {
        return Err(Fault::malformed(format!("windows of {} in {} with the result {ty}", updates.ty, a.ty)));
    }
    let distances = strides(&a.ty.shape);
    let mut pairs = vec![];
    let mut update = 0;
    each_index(&updates.ty.shape, |index| {
        let (start, offset) = (windows.start(index), windows.offset(index));
        let inside = (0..a.ty.rank()).try_fold(0, |at, k| {
            let i = usize::try_from(start[k].checked_add(i64::try_from(offset[k]).ok()?)?).ok()?;
            (i < a.ty.shape[k]).then(|| at + i * distances[k])
        });
        let whole = |(k, i): (&usize, &usize)| {
            let end = start[*k].checked_add(i64::try_from(updates.ty.shape[*i]).unwrap_or(i64::MAX));
            start[*k] >= 0 && end.is_some_and(|end| usize::try_from(end).is_ok_and(|end| end <= a.ty.shape[*k]))
        };
        if inside.is_some() && !windows.kept.iter().zip(windows.inner).all(whole) {
            let reason = format!("a window at {start:?} that is partly outside of {}", a.ty);
            return Err(Fault::Uninterpreted(reason));
        }
        pairs.extend(inside.map(|at| (at, update)));
        update += 1;
        Ok(())
    })?;
    let mut result = a.elements.clone();
    for (at, update) in pairs {
        let both = combine(reducer.binary(), &one(&result, at), &one(&updates.elements, update), ty.dtype)?;
        put(&mut result, at, &both);
    }
    Ok(result)
}

fn one(elements: &Elements, at: usize) -> Elements {
    match elements {
        Elements::Float(x) => Elements::Float(vec![x[at]]),
        Elements::Int(x) => Elements::Int(vec![x[at]]),
        Elements::Pred(x) => Elements::Pred(vec![x[at]]),
    }
}

fn put(elements: &mut Elements, at: usize, value: &Elements) {
    match (elements, value) {
        (Elements::Float(x), Elements::Float(value)) => x[at] = value[0],
        (Elements::Int(x), Elements::Int(value)) => x[at] = value[0],
        (Elements::Pred(x), Elements::Pred(value)) => x[at] = value[0],
        // Unreachable: `combine` keeps the variant of the elements.
        _ => {}
    }
}
