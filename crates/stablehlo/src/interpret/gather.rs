//! Gathers and scatters.

use super::Fault;
use super::array::{Array, Elements, each_index, place, put, strides};
use super::elementwise::combine;
use crate::graph::{GatherDimensions, Reducer, ScatterDimensions};
use crate::types::TensorType;

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
    /// `dropped` are the operand's dimensions that windows do not have; `ty` is the type of the windows' tensor. The
    /// builder does not check dimension numbers.
    fn new(
        operand: &TensorType,
        indices: &'a Array,
        ty: &TensorType,
        (inner, dropped, map, vector): (&'a [usize], &[usize], &'a [usize], usize),
        batching: (&'a [usize], &'a [usize]),
    ) -> Result<Self, Fault> {
        let (rank, index_type) = (operand.rank(), &indices.ty);
        let distinct = |dimensions: &[usize], ty: &TensorType| crate::build::distinct(dimensions, ty).is_ok();
        let legal = distinct(inner, ty)
            && distinct(&[map, batching.0].concat(), operand)
            && distinct(&[dropped, batching.0].concat(), operand)
            && distinct(batching.1, index_type)
            && !batching.1.contains(&vector)
            && inner.is_sorted();
        let kept: Vec<usize> = (0..rank).filter(|d| !dropped.contains(d) && !batching.0.contains(d)).collect();
        let outer: Vec<usize> = (0..ty.rank()).filter(|d| !inner.contains(d)).collect();
        // Index vectors of one entry need no dimension of their own.
        let entries = if vector == index_type.rank() { Some(&1) } else { index_type.shape.get(vector) };
        let batch = (0..index_type.rank()).filter(|d| *d != vector).map(|d| index_type.shape[d]);
        let sizes = |ty: &TensorType, dimensions: &[usize]| dimensions.iter().map(|d| ty.shape[*d]).collect::<Vec<_>>();
        let fits = legal
            && kept.len() == inner.len()
            && entries == Some(&map.len())
            && batch.eq(sizes(ty, &outer))
            && sizes(operand, batching.0) == sizes(index_type, batching.1);
        if !fits {
            let reason = format!("dimension numbers that fit {operand}, indices {index_type} and {ty} expected");
            return Err(Fault::Malformed(reason));
        }
        Ok(Self { inner, outer, kept, batching, map, vector, indices: indices.integers(), index_type, rank })
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
pub(super) fn gather(a: &Array, indices: &Array, d: &GatherDimensions, ty: &TensorType) -> Result<Elements, Fault> {
    let dimensions = (&d.offset_dims[..], &d.collapsed_slice_dims[..], &d.start_index_map[..], d.index_vector_dim);
    let batching = (&d.operand_batching_dims[..], &d.start_indices_batching_dims[..]);
    let windows = Windows::new(&a.ty, indices, ty, dimensions, batching)?;
    let mut sizes = vec![1; a.ty.rank()];
    windows.kept.iter().zip(windows.inner).for_each(|(k, i)| sizes[*k] = ty.shape[*i]);
    if d.slice_sizes != sizes {
        return Err(Fault::Malformed(format!("windows of {:?} of {} are no {ty}", d.slice_sizes, a.ty)));
    }
    let distances = strides(&a.ty.shape);
    let mut places = Vec::with_capacity(ty.elements());
    each_index(&ty.shape, |index| {
        let (start, offset) = (windows.start(index), windows.offset(index));
        let along = |k: usize| {
            let room = i64::try_from(a.ty.shape[k] - sizes[k]).unwrap_or(i64::MAX);
            start[k].clamp(0, room) as usize + offset[k]
        };
        places.push((0..sizes.len()).map(|k| along(k) * distances[k]).sum());
    });
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
) -> Result<Elements, Fault> {
    let dimensions = (
        &d.update_window_dims[..],
        &d.inserted_window_dims[..],
        &d.scatter_dims_to_operand_dims[..],
        d.index_vector_dim,
    );
    let batching = (&d.input_batching_dims[..], &d.scatter_indices_batching_dims[..]);
    let windows = Windows::new(&a.ty, indices, &updates.ty, dimensions, batching)?;
    let window = |(k, i): (&usize, &usize)| updates.ty.shape[*i] <= a.ty.shape[*k];
    if !windows.kept.iter().zip(windows.inner).all(window) {
        return Err(Fault::Malformed(format!("windows of {} in {}", updates.ty, a.ty)));
    }
    let distances = strides(&a.ty.shape);
    let (mut pairs, mut partly) = (vec![], None);
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
            partly.get_or_insert(start);
        }
        pairs.extend(inside.map(|at| (at, update)));
        update += 1;
    });
    if let Some(start) = partly {
        let reason = format!("a window at {start:?} that is partly outside of {}", a.ty);
        return Err(Fault::Uninterpreted(reason));
    }
    let mut result = a.clone();
    for (at, update) in pairs {
        let both = combine(reducer.binary(), &result.take(&[at]), &updates.take(&[update]), a.ty.dtype);
        put(&mut result.elements, at, &both, 0, 1);
    }
    Ok(result.elements)
}
