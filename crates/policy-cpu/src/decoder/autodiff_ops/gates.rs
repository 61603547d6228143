//! The output gates of attention.
//!
//! Legend: N rows, A query heads, K key/value heads, D head width.

use super::second::Second;
use super::{operand, read, reread};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::Heads;
use grpo_burn::custom_op::{Derivative, Graph, record, tensor};
use grpo_policy::Result;
use rayon::prelude::*;

/// Splits rows `[N, (2A + 2K) D]`, with a gate behind every query head, into queries, keys and values `[N, (A + 2K) D]` and gates `[N, A D]`.
pub(crate) fn split_gates(rows: Tensor<2>, heads: Heads) -> Result<(Tensor<2>, Tensor<2>)> {
    let [n, columns] = rows.dims();
    let mut graph = Graph::default();
    let rows = operand(&mut graph, "qkv", rows)?;
    let queries = heads.query * heads.width;
    let (qkv, gates) = without_gates(read("qkv", &rows.storage)?, heads);
    let second = Second::default();
    let derivative = SplitGatesGrad { gates: second.clone(), heads, dims: [n, columns] };
    let qkv = record(graph, tensor(qkv, [n, columns - queries]), [rows.node], derivative);
    let gates = second.output(tensor(gates, [n, queries]), &qkv)?;
    Ok((qkv, gates))
}

/// Splits rows `[N, (2A + 2K) D]` as [`split_gates`] does.
pub(crate) fn without_gates(rows: &[f32], heads: Heads) -> (Vec<f32>, Vec<f32>) {
    let (queries, width) = (heads.query * heads.width, heads.width.max(1));
    let columns = (heads.row() + queries).max(1);
    let n = rows.len() / columns;
    let [mut qkv, mut gates] = [columns - queries, queries].map(|width| Vec::with_capacity(n * width));
    for row in rows.chunks_exact(columns) {
        let (of_queries, rest) = row.split_at(2 * queries);
        for head in of_queries.chunks_exact(2 * width) {
            qkv.extend_from_slice(&head[..width]);
            gates.extend_from_slice(&head[width..]);
        }
        qkv.extend_from_slice(rest);
    }
    (qkv, gates)
}

#[derive(Clone, Debug)]
struct SplitGatesGrad {
    gates: Second,
    heads: Heads,
    dims: [usize; 2],
}

impl Derivative<1> for SplitGatesGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let [n, columns] = self.dims;
        let (queries, width) = (self.heads.query * self.heads.width, self.heads.width.max(1));
        let dgates = self.gates.take();
        let mut gradient = vec![0.0; n * columns];
        for (row, dqkv) in
            gradient.chunks_exact_mut(columns.max(1)).zip(reread(&upstream).chunks_exact(columns - queries))
        {
            let (dqueries, rest) = dqkv.split_at(queries);
            let of_heads = row[..2 * queries].chunks_exact_mut(2 * width).zip(dqueries.chunks_exact(width));
            of_heads.for_each(|(to, from)| to[..width].copy_from_slice(from));
            row[2 * queries..].copy_from_slice(rest);
        }
        let dgates = dgates.iter().flat_map(|dgates| reread(dgates).chunks_exact(queries.max(1)));
        for (row, dgates) in gradient.chunks_exact_mut(columns.max(1)).zip(dgates) {
            let of_heads = row[..2 * queries].chunks_exact_mut(2 * width).zip(dgates.chunks_exact(width));
            of_heads.for_each(|(to, from)| to[width..].copy_from_slice(from));
        }
        [Some(tensor(gradient, self.dims))]
    }
}

/// Returns values `[N, I]` times the sigmoid of their gates, `[N, I]`, or `[N, 1]` for the values of a row.
pub(crate) fn gated_values(values: Tensor<2>, gates: Tensor<2>) -> Result<Tensor<2>> {
    let dims = [values.dims(), gates.dims()];
    let mut graph = Graph::default();
    let values = operand(&mut graph, "values", values)?;
    let gates = operand(&mut graph, "gates", gates)?;
    let factors: Vec<f32> = read("gates", &gates.storage)?.par_iter().with_min_len(ROWS).map(|x| sigmoid(*x)).collect();
    let mut y = read("values", &values.storage)?.to_vec();
    let columns = (y.len() / factors.len().max(1)).max(1);
    for (y, factor) in y.chunks_exact_mut(columns).zip(&factors) {
        y.iter_mut().for_each(|y| *y *= factor);
    }
    let derivative = GatedValuesGrad { values: values.storage, factors, dims };
    Ok(record(graph, tensor(y, dims[0]), [values.node, gates.node], derivative))
}

/// The smallest number of sigmoids of a parallel task.
const ROWS: usize = 1 << 10;

#[derive(Clone, Debug)]
struct GatedValuesGrad {
    values: FlexTensor,
    /// The sigmoids of the gates.
    factors: Vec<f32>,
    /// Of the values, and of the gates.
    dims: [[usize; 2]; 2],
}

impl Derivative<2> for GatedValuesGrad {
    fn gradients(self, upstream: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let (values, dy) = (reread(&self.values), reread(&upstream));
        let columns = (dy.len() / self.factors.len().max(1)).max(1);
        let rows = || dy.chunks_exact(columns).zip(&self.factors);
        let dvalues: Vec<f32> = rows().flat_map(|(dy, factor)| dy.iter().map(move |dy| dy * factor)).collect();
        let dgate = |((dy, factor), values): ((&[f32], &f32), &[f32])| {
            dy.iter().zip(values).map(|(dy, value)| dy * value * factor * (1.0 - factor)).sum::<f32>()
        };
        let dgates: Vec<f32> = rows().zip(values.chunks_exact(columns)).map(dgate).collect();
        [Some(tensor(dvalues, self.dims[0])), Some(tensor(dgates, self.dims[1]))]
    }
}

/// Returns 1 / (1 + e^-x), 0 if e^-x overflows.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
