//! Derivatives of slices and scatters at dynamic positions.

use super::super::wide;
use super::{Parts, Step};
use crate::build::Value;
use crate::graph::{GatherDimensions, Number, Reducer, ScatterDimensions};
use crate::types::TensorType;

pub(super) fn dynamic_slice(step: &Step<'_>) -> Parts {
    let ct = step.cotangent();
    let starts: Vec<&Value> = step.operands[1..].iter().collect();
    let zeros = step.zeros(&step.operands[0].ty().with_dtype(ct.dtype()));
    step.parts(|i| (i == 0).then(|| zeros.dynamic_update_slice(ct, &starts)))
}

pub(super) fn dynamic_update_slice(step: &Step<'_>) -> Parts {
    let (ct, update) = (step.cotangent(), &step.operands[1]);
    let starts: Vec<&Value> = step.operands[2..].iter().collect();
    step.parts(|i| match i {
        0 => Some(ct.dynamic_update_slice(&step.zeros(&update.ty().with_dtype(ct.dtype())), &starts)),
        1 => Some(ct.dynamic_slice(&starts, update.shape())),
        _ => None,
    })
}

/// The cotangents of windows are added at the positions that they were read from.
pub(super) fn gather(step: &Step<'_>, d: &GatherDimensions) -> Parts {
    let (ct, x, indices) = (step.cotangent(), &step.operands[0], &step.operands[1]);
    let dimensions = ScatterDimensions::from(d);
    step.parts(|i| {
        // A gather clamps the start of a window; a scatter would drop the window.
        let last = last_starts(x.shape(), &d.slice_sizes, &d.start_index_map);
        let (least, most) = (indices.like(0), per_component(indices, d.index_vector_dim, &last));
        let within = indices.clamp(&least, &most);
        // The sum over many reads of a row needs a wide dtype.
        let zeros = || step.zeros(&x.ty().with_dtype(wide(ct.dtype())));
        let sum = step.begun.as_ref().map_or_else(zeros, |begun| begun.convert(wide(begun.dtype())));
        (i == 0).then(|| sum.scatter(&within, &ct.convert(sum.dtype()), dimensions.clone(), Reducer::Add))
    })
}

/// For a scatter that adds: the operand gets the cotangent unchanged, the updates get the windows that they were added
/// to.
pub(super) fn scatter(step: &Step<'_>, d: &ScatterDimensions) -> Parts {
    let (ct, indices, updates) = (step.cotangent(), &step.operands[1], &step.operands[2]);
    let rank = ct.ty().rank();
    let mut windows = d.update_window_dims.iter().map(|dim| updates.shape()[*dim]);
    let slice_sizes: Vec<usize> = (0..rank)
        .map(|dim| match d.inserted_window_dims.contains(&dim) || d.input_batching_dims.contains(&dim) {
            true => 1,
            false => windows.next().unwrap_or(1),
        })
        .collect();
    let gather = GatherDimensions {
        offset_dims: d.update_window_dims.clone(),
        collapsed_slice_dims: d.inserted_window_dims.clone(),
        operand_batching_dims: d.input_batching_dims.clone(),
        start_indices_batching_dims: d.scatter_indices_batching_dims.clone(),
        start_index_map: d.scatter_dims_to_operand_dims.clone(),
        index_vector_dim: d.index_vector_dim,
        slice_sizes: slice_sizes.clone(),
    };
    step.parts(|i| match i {
        0 => Some(ct.clone()),
        2 => {
            let gathered = ct.gather(indices, gather.clone(), updates.shape());
            // Windows that do not fit were dropped as a whole, as in XLA.
            let last = last_starts(ct.shape(), &slice_sizes, &d.scatter_dims_to_operand_dims);
            let most = per_component(indices, d.index_vector_dim, &last);
            let fits = indices.ge(&indices.like(0)) & indices.le(&most);
            let fits = match d.index_vector_dim < indices.ty().rank() {
                true => fits.reduce(Reducer::And, &[d.index_vector_dim]),
                false => fits,
            };
            let places: Vec<usize> = (0..updates.ty().rank()).filter(|d2| !d.update_window_dims.contains(d2)).collect();
            let fits = fits.broadcast_in_dim(updates.shape(), &places);
            Some(fits.select(&gathered, &gathered.like(0.0)))
        }
        _ => None,
    })
}

/// Returns the last start at which a window fits, per component of an index vector.
fn last_starts(shape: &[usize], sizes: &[usize], map: &[usize]) -> Vec<i64> {
    map.iter().map(|d| shape[*d] as i64 - sizes[*d] as i64).collect()
}

/// Returns a constant of the type of `indices` with one number per component of an index vector.
fn per_component(indices: &Value, index_vector_dim: usize, numbers: &[i64]) -> Value {
    let highest = match Number::range(indices.dtype()) {
        [_, Number::Int(highest)] => highest,
        _ => i64::MAX,
    };
    let numbers: Vec<i64> = numbers.iter().map(|n| (*n).min(highest)).collect();
    match &numbers[..] {
        [number] => indices.like(*number),
        numbers => {
            let ty = TensorType::new(indices.dtype(), [numbers.len()]);
            let numbers = indices.builder().dense(numbers.iter().copied(), ty);
            numbers.broadcast_in_dim(indices.shape(), &[index_vector_dim])
        }
    }
}
