//! The rows of a trained embedding that a batch looks up, as a leaf of the autodiff graph.
//!
//! The gradient of this leaf is `[N, H]`. With the embedding as the leaf, it would be a matrix `[V, H]` that is zero except in these rows, and autodiff
//! would add the whole matrix to the gradient of a tied head.

use super::host::to_host;
use burn::tensor::{Gradients, Tensor};
use std::collections::BTreeMap;

/// The rows `[N, H]` of a trained embedding for the tokens of a batch, a leaf of the autodiff graph.
#[derive(Debug)]
pub(crate) struct EmbeddedRows {
    ids: Vec<u32>,
    rows: Tensor<2>,
    /// The token whose row has no gradient.
    padding: Option<usize>,
}

impl EmbeddedRows {
    pub(super) fn new(ids: &[u32], rows: Tensor<2>, padding: Option<usize>) -> Self {
        Self { ids: ids.to_vec(), rows, padding }
    }

    /// Takes the gradient of the embedding from `gradients`.
    pub(crate) fn gradient(self, gradients: &mut Gradients) -> RowGradients {
        let width = self.rows.dims()[1];
        let of_rows = self.rows.grad_remove(gradients).map(to_host).unwrap_or_default();
        let mut sums = BTreeMap::<usize, Vec<f32>>::new();
        for (id, row) in self.ids.iter().zip(of_rows.chunks_exact(width.max(1))) {
            let id = *id as usize;
            if self.padding == Some(id) {
                continue;
            }
            let sum = sums.entry(id).or_insert_with(|| vec![0.0; width]);
            sum.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
        }
        RowGradients(sums)
    }
}

/// The gradient of an embedding: the sum `[H]` over the positions of every token. Other rows are 0.
#[derive(Debug)]
pub(crate) struct RowGradients(BTreeMap<usize, Vec<f32>>);

impl RowGradients {
    /// Adds the rows to a gradient `[V, H]`.
    pub(crate) fn add_to(&self, gradient: &mut [f32]) {
        for (id, sum) in &self.0 {
            let row = &mut gradient[id * sum.len()..(id + 1) * sum.len()];
            row.iter_mut().zip(sum).for_each(|(to, g)| *to += g);
        }
    }
}
