//! RMSNorm: y = x / sqrt(mean(x^2) + eps) * w (arXiv 1910.07467).

use super::{Heads, Layers, ROWS, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::threads::slices::*;
use grpo_core::error::Result;

/// The number of independent sums, which hide the latency of additions.
const LANES: usize = 32;

impl Layers {
    /// Computes (y `[N, H]`, 1 / rms `[N]`) of x `[N, H]` and the weight `[H]`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if the length of x is not a multiple of the weight's.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f64) -> Result<(Vec<f32>, Vec<f32>)> {
        let h = weight.len();
        let n = x.len() / h.max(1);
        fits("rms_norm", "x", x.len(), &[n, h])?;
        let (mut y, mut scale) = (vec![0.0; n * h], vec![0.0; n]);
        let tasks =
            y.par_chunks_mut(ROWS * h.max(1)).zip(scale.par_chunks_mut(ROWS)).zip(x.par_chunks(ROWS * h.max(1)));
        tasks.for_each(|((y, scale), x)| forward(self.gemm.isa(), x, weight, eps as f32, y, scale));
        Ok((y, scale))
    }

    /// Computes (dL/dx `[N, H]`, dL/dw `[H]`) from the forward pass's x, weight and 1 / rms, and dy `[N, H]`.
    ///
    /// # Errors
    /// As [`Layers::rms_norm`].
    pub fn rms_norm_grad(&self, x: &[f32], weight: &[f32], scale: &[f32], dy: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let h = weight.len();
        fits("rms_norm_grad", "x", x.len(), &[scale.len(), h])?;
        fits("rms_norm_grad", "dy", dy.len(), &[scale.len(), h])?;
        let tasks = scale.len().div_ceil(ROWS);
        let (mut dx, mut parts) = (vec![0.0; x.len()], vec![0.0; tasks * h]);
        let block = ROWS * h.max(1);
        let inputs = x.par_chunks(block).zip(dy.par_chunks(block)).zip(scale.par_chunks(ROWS));
        let outputs = dx.par_chunks_mut(block).zip(parts.par_chunks_mut(h.max(1)));
        inputs.zip(outputs).for_each(|(((x, dy), scale), (dx, dweight))| {
            backward(self.gemm.isa(), x, weight, scale, dy, dx, dweight);
        });
        // In the order of the rows, for any order of the threads.
        let mut dweight = vec![0.0; h];
        parts.chunks_exact(h.max(1)).for_each(|part| super::linear::add_to(self.gemm.isa(), part, &mut dweight));
        Ok((dx, dweight))
    }
}

/// The weights of the norms of queries and of keys, and epsilon.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// The weight `[D]` that all query heads share, or `[A D]` for one norm over all query heads.
    pub query: &'a [f32],
    /// The weight `[D]` that all key heads share, or `[K D]` for one norm over all key heads.
    pub key: &'a [f32],
    /// Epsilon, which is added to the mean square.
    pub eps: f64,
}

impl HeadNorms<'_> {
    /// Returns the numbers of norms of queries and of keys in a row.
    fn per_row(&self, operation: &'static str, heads: Heads) -> Result<[usize; 2]> {
        let norms = |what, weight: &[f32], count: usize| {
            if weight.len() == count * heads.width && count > 1 {
                return Ok(1);
            }
            fits(operation, what, weight.len(), &[heads.width]).map(|()| count)
        };
        Ok([norms("query weight", self.query, heads.query)?, norms("key weight", self.key, heads.key_value)?])
    }
}

/// The gradients of [`Layers::norm_heads`].
#[derive(Clone, Debug)]
pub struct HeadNormsGrad {
    /// dL/dqkv `[N, (A + 2K) D]`.
    pub dqkv: Vec<f32>,
    /// dL/d([`HeadNorms::query`]).
    pub dquery: Vec<f32>,
    /// dL/d([`HeadNorms::key`]).
    pub dkey: Vec<f32>,
}

impl Layers {
    /// Normalises every query head and every key head of `qkv: [N, (A + 2K) D]` separately, as in Qwen3 before the rotary
    /// embedding, or all query heads and all key heads together, as in OLMo 2. Values are unchanged. Returns (the rows
    /// `[N, (A + 2K) D]`, 1 / rms `[N, norms of a row]`).
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] if rows or weights do not match the heads.
    pub fn norm_heads(&self, qkv: &[f32], heads: Heads, norms: HeadNorms<'_>) -> Result<(Vec<f32>, Vec<f32>)> {
        let [query_norms, key_norms] = norms.per_row("norm_heads", heads)?;
        let (row, per_row) = (heads.row().max(1), query_norms + key_norms);
        let n = qkv.len() / row;
        fits("norm_heads", "qkv", qkv.len(), &[n, heads.row()])?;
        let (mut y, mut scale) = (qkv.to_vec(), vec![0.0; n * per_row]);
        let (isa, eps) = (self.gemm.isa(), norms.eps as f32);
        let [queries, keys] = [heads.query, heads.query + heads.key_value].map(|count| count * heads.width);
        let tasks = y.par_chunks_mut(ROWS * row).zip(scale.par_chunks_mut((ROWS * per_row).max(1)));
        tasks.zip(qkv.par_chunks(ROWS * row)).for_each(|((y, scale), x)| {
            let rows = y.chunks_exact_mut(row).zip(scale.chunks_exact_mut(per_row)).zip(x.chunks_exact(row));
            for ((y, scale), x) in rows {
                let (query_norms, key_norms) = scale.split_at_mut(query_norms);
                forward(isa, &x[..queries], norms.query, eps, &mut y[..queries], query_norms);
                forward(isa, &x[queries..keys], norms.key, eps, &mut y[queries..keys], key_norms);
            }
        });
        Ok((y, scale))
    }

    /// Computes the gradients of [`Layers::norm_heads`] from the forward pass's rows, weights and 1 / rms, and
    /// `dy: [N, (A + 2K) D]`.
    ///
    /// # Errors
    /// As [`Layers::norm_heads`].
    pub fn norm_heads_grad(
        &self,
        qkv: &[f32],
        heads: Heads,
        norms: HeadNorms<'_>,
        scale: &[f32],
        dy: &[f32],
    ) -> Result<HeadNormsGrad> {
        let [query_norms, key_norms] = norms.per_row("norm_heads_grad", heads)?;
        let (row, per_row) = (heads.row().max(1), query_norms + key_norms);
        let n = scale.len() / per_row.max(1);
        fits("norm_heads_grad", "scale", scale.len(), &[n, per_row])?;
        fits("norm_heads_grad", "qkv", qkv.len(), &[n, heads.row()])?;
        fits("norm_heads_grad", "dy", dy.len(), &[n, heads.row()])?;
        let (query_len, weights_len) = (norms.query.len(), norms.query.len() + norms.key.len());
        let (mut dqkv, mut parts) = (dy.to_vec(), vec![0.0; n.div_ceil(ROWS) * weights_len]);
        let isa = self.gemm.isa();
        let [queries, keys] = [heads.query, heads.query + heads.key_value].map(|count| count * heads.width);
        let inputs = qkv.par_chunks(ROWS * row).zip(dy.par_chunks(ROWS * row));
        let inputs = inputs.zip(scale.par_chunks((ROWS * per_row).max(1)));
        let outputs = dqkv.par_chunks_mut(ROWS * row).zip(parts.par_chunks_mut(weights_len.max(1)));
        inputs.zip(outputs).for_each(|(((x, dy), scale), (dx, dweight))| {
            let (dquery, dkey) = dweight.split_at_mut(query_len);
            let rows = x.chunks_exact(row).zip(dy.chunks_exact(row)).zip(scale.chunks_exact(per_row));
            for (((x, dy), scale), dx) in rows.zip(dx.chunks_exact_mut(row)) {
                let (query_norms, key_norms) = scale.split_at(query_norms);
                let (part, dx_part) = (0..queries, &mut dx[..queries]);
                backward(isa, &x[part.clone()], norms.query, query_norms, &dy[part], dx_part, dquery);
                let (part, dx_part) = (queries..keys, &mut dx[queries..keys]);
                backward(isa, &x[part.clone()], norms.key, key_norms, &dy[part], dx_part, dkey);
            }
        });
        let (mut dquery, mut dkey) = (vec![0.0; query_len], vec![0.0; norms.key.len()]);
        for part in parts.chunks_exact(weights_len.max(1)) {
            super::linear::add_to(isa, &part[..query_len], &mut dquery);
            super::linear::add_to(isa, &part[query_len..], &mut dkey);
        }
        Ok(HeadNormsGrad { dqkv, dquery, dkey })
    }
}

simd_dispatch! {
    fn forward(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32], scale: &mut [f32]) = forward_body
}

#[inline(always)]
fn forward_body<M: MulAdd>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32], scale: &mut [f32]) {
    let h = weight.len();
    for ((x, y), scale) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)).zip(scale) {
        let s = 1.0 / (dot::<M>(x, x) / h as f32 + eps).sqrt();
        *scale = s;
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * s * w;
        }
    }
}

simd_dispatch! {
    fn backward(
        x: &[f32], weight: &[f32], scale: &[f32], dy: &[f32], dx: &mut [f32], dweight: &mut [f32],
    ) = backward_body
}

/// With x' = x s: dw = sum of dy x', and dx = s (dy w - x' mean(dy w x')).
#[inline(always)]
fn backward_body<M: MulAdd>(x: &[f32], weight: &[f32], scale: &[f32], dy: &[f32], dx: &mut [f32], dweight: &mut [f32]) {
    let h = weight.len();
    let rows = x.chunks_exact(h).zip(dy.chunks_exact(h)).zip(dx.chunks_exact_mut(h)).zip(scale);
    for (((x, dy), dx), &s) in rows {
        for (((dx, dw), (x, dy)), w) in dx.iter_mut().zip(dweight.iter_mut()).zip(x.iter().zip(dy)).zip(weight) {
            *dw = M::mul_add(*dy, x * s, *dw);
            *dx = dy * w;
        }
        let mean = dot::<M>(dx, x) * s / h as f32;
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = s * (*dx - x * s * mean);
        }
    }
}

/// The dot product of two rows, in [`LANES`] independent sums.
#[inline(always)]
fn dot<M: MulAdd>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = M::mul_add(*a, *b, *lane);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    a_rest.iter().zip(b_rest).fold(lanes[0], |sum, (a, b)| M::mul_add(*a, *b, sum))
}
