//! Factors, sums and selected rows of the residual stream.

use super::second::{CHUNK, add};
use super::{operand, read, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_policy::Result;
use rayon::prelude::*;
use std::sync::Arc;

/// Returns x `[N, H]` times a constant factor, without an operation if it is 1.
pub(crate) fn scaled(x: Tensor<2>, factor: f32) -> Result<Tensor<2>> {
    if factor == 1.0 {
        return Ok(x);
    }
    let dims = x.dims();
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let y = multiplied(read("x", &x.storage)?, factor);
    Ok(record(graph, tensor(y, dims), [x.node], ScaledGrad { factor, dims }))
}

/// Returns x + `factor` y for x and y `[N, H]`.
pub(crate) fn add_scaled(x: Tensor<2>, y: Tensor<2>, factor: f32) -> Result<Tensor<2>> {
    let dims = x.dims();
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let y = operand(&mut graph, "y", y)?;
    let values = read("y", &y.storage)?;
    let mut sum = if factor == 1.0 { values.to_vec() } else { multiplied(values, factor) };
    add(&mut sum, read("x", &x.storage)?);
    Ok(record(graph, tensor(sum, dims), [x.node, y.node], ScaledGrad { factor, dims }))
}

#[derive(Clone, Debug)]
struct ScaledGrad {
    factor: f32,
    dims: [usize; 2],
}

impl ScaledGrad {
    fn gradient(&self, upstream: &FlexTensor) -> FlexTensor {
        if self.factor == 1.0 {
            return upstream.clone();
        }
        tensor(multiplied(reread(upstream), self.factor), self.dims)
    }
}

impl Derivative<1> for ScaledGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.gradient(&upstream))]
    }
}

impl Derivative<2> for ScaledGrad {
    fn gradients(self, upstream: FlexTensor, [_, y]: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let gradient = y.then(|| self.gradient(&upstream));
        [Some(upstream), gradient]
    }
}

fn multiplied(values: &[f32], factor: f32) -> Vec<f32> {
    let mut product = vec![0.0; values.len()];
    let chunks = product.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, value)| *to = value * factor));
    product
}

/// Returns the given rows `[R, H]` of x `[N, H]`; rows may repeat.
pub(crate) fn select_rows(x: Tensor<2>, rows: &[usize]) -> Result<Tensor<2>> {
    let dims @ [_, width] = x.dims();
    let mut graph = Graph::default();
    let x = operand(&mut graph, "x", x)?;
    let values = read("x", &x.storage)?;
    let mut selected = Vec::with_capacity(rows.len() * width);
    rows.iter().for_each(|row| selected.extend_from_slice(&values[row * width..(row + 1) * width]));
    Ok(record(graph, tensor(selected, [rows.len(), width]), [x.node], SelectRowsGrad { rows: rows.into(), dims }))
}

#[derive(Clone, Debug)]
struct SelectRowsGrad {
    rows: Arc<[usize]>,
    dims: [usize; 2],
}

impl Derivative<1> for SelectRowsGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [n, width] = self.dims;
        let mut gradient = vec![0.0; n * width];
        for (row, dy) in self.rows.iter().zip(reread(&upstream).chunks_exact(width.max(1))) {
            let to = &mut gradient[row * width..(row + 1) * width];
            to.iter_mut().zip(dy).for_each(|(to, dy)| *to += dy);
        }
        [Some(tensor(gradient, self.dims))]
    }
}
