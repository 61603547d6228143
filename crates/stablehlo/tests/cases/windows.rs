//! Gathers and scatters of rows, of windows, with batches, with indices out of range, and with overlapping windows.

use super::*;

pub fn cases() -> Vec<Case> {
    vec![gathers(), scatters()]
}

/// Rows of a matrix with `width` columns.
pub fn rows(width: usize) -> GatherDimensions {
    GatherDimensions {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1, width],
        ..GatherDimensions::default()
    }
}

/// Windows of a matrix; their corners are (column, row) pairs along the first dimension of the indices.
pub fn corners(sizes: [usize; 2]) -> GatherDimensions {
    GatherDimensions {
        offset_dims: vec![0, 2],
        start_index_map: vec![1, 0],
        index_vector_dim: 0,
        slice_sizes: sizes.to_vec(),
        ..GatherDimensions::default()
    }
}

/// One entry per row of a matrix.
pub fn entries(index_vector_dim: usize) -> GatherDimensions {
    GatherDimensions {
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        start_indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim,
        slice_sizes: vec![1, 1],
        ..GatherDimensions::default()
    }
}

/// Elements of a vector, with one index per row of the indices.
pub fn elements() -> ScatterDimensions {
    ScatterDimensions {
        inserted_window_dims: vec![0],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    }
}

fn gathers() -> Case {
    let mut random = Random(10);
    let arguments = [
        random.array(Dtype::F32, &[5, 3]),
        i32s(&[4, 1], &[4, -3, 100, 2]),
        i32s(&[2, 3], &[0, 1, -9, 4, 2, 9]),
        i32s(&[5, 2], &[0, 1, 2, 2, 7, -7, 1, 1, 0, 2]),
        random.array(Dtype::Pred, &[5, 3]),
        Array::ints(Dtype::U32, [2], [u32::MAX.into(), 1]).expect("integers"),
        i32s(&[0, 1], &[]),
    ];
    case("gather", &arguments, |_, a| {
        let flat = GatherDimensions { index_vector_dim: 1, ..rows(3) };
        vec![
            a[0].gather(&a[1], rows(3), &[4, 3]),
            a[4].gather(&a[1], rows(3), &[4, 3]),
            a[0].gather(&a[2], corners([2, 2]), &[2, 3, 2]),
            a[0].gather(&a[3], entries(2), &[5, 2]),
            a[0].gather(&a[5], flat, &[2, 3]),
            a[0].gather(&a[6], rows(3), &[0, 3]),
        ]
    })
}

fn scatters() -> Case {
    let mut random = Random(11);
    let arguments = [
        random.array(Dtype::F32, &[5, 3]),
        i32s(&[4, 1], &[4, -3, 4, 2]),
        random.array(Dtype::F32, &[4, 3]),
        i32s(&[2, 3], &[0, 1, 0, 3, 2, 3]),
        random.array(Dtype::F32, &[2, 3, 2]),
        i32s(&[5, 2], &[0, 1, 2, 2, 7, -7, 1, 1, 0, 2]),
        random.array(Dtype::F32, &[5, 2]),
        random.array(Dtype::I32, &[5, 3]),
        random.array(Dtype::I32, &[4, 3]),
        i32s(&[0, 1], &[]),
        random.array(Dtype::Pred, &[5, 3]),
        random.array(Dtype::Pred, &[4, 3]),
    ];
    case("scatter", &arguments, |_, a| {
        let [rows, corners, entries] = [rows(3), corners([2, 2]), entries(2)].map(|d| ScatterDimensions::from(&d));
        let mut results = vec![];
        for reducer in Reducer::VARIANTS.iter().copied() {
            results.push(a[7].scatter(&a[1], &a[8], rows.clone(), reducer));
            if !reducer.fits(Dtype::F32) {
                results.push(a[10].scatter(&a[1], &a[11], rows.clone(), reducer));
                continue;
            }
            results.push(a[0].scatter(&a[1], &a[2], rows.clone(), reducer));
            results.push(a[0].scatter(&a[3], &a[4], corners.clone(), reducer));
            results.push(a[0].scatter(&a[5], &a[6], entries.clone(), reducer));
            results.push(a[0].scatter(&a[9], &a[2].slice(&[0, 0], &[0, 3]), rows.clone(), reducer));
        }
        results
    })
}
