//! The forward pass of a value head for the rows of a chunk; see the [parent module](super) for the formulas.

use super::head::{Head, silu};
use crate::arch::{MulAdd, simd_dispatch};
use crate::gemm::{KAxis, MatMut};
use crate::layers::product::{Operand, multiply_here};
use crate::softmax::exp;
use std::ops::Range;

/// Strengths and decays of the rows of a chunk.
pub(super) struct Decays {
    /// b `[c]`.
    pub(super) strengths: Vec<f32>,
    /// g `[c]`.
    pub(super) logs: Vec<f32>,
    /// exp(G) `[c]`, the decay from the start of the chunk to a row.
    pub(super) from_start: Vec<f32>,
    /// exp(G_c - G) `[c]`, the decay from a row to the end of the chunk.
    pub(super) to_end: Vec<f32>,
    /// G `[c]`, in f64: G_i - G_j of two large sums in f32 would have a large relative error.
    sums: Vec<f64>,
}

impl Decays {
    pub(super) fn new(strengths: Vec<f32>, logs: Vec<f32>) -> Self {
        let sum = |sum: &mut f64, g: &f32| {
            *sum += f64::from(*g);
            Some(*sum)
        };
        let sums: Vec<f64> = logs.iter().scan(0.0, sum).collect();
        let end = sums.last().copied().unwrap_or(0.0);
        let from_start = sums.iter().map(|sum| (*sum as f32).exp()).collect();
        let to_end = sums.iter().map(|sum| ((end - sum) as f32).exp()).collect();
        Self { strengths, logs, from_start, to_end, sums }
    }

    /// Returns the decay of the chunk.
    pub(super) fn whole(&self) -> f32 {
        self.from_start.last().copied().unwrap_or(1.0)
    }
}

/// The intermediate values of a value head for the rows of a chunk.
pub(super) struct ValueChunk {
    pub(super) decays: Decays,
    /// v `[c, Dv]`.
    pub(super) values: Vec<f32>,
    /// D, the lower triangle of decays between rows `[c, c]`; zeros above it.
    pub(super) between: Vec<f32>,
    /// A, strictly lower `[c, c]`.
    pub(super) system: Vec<f32>,
    /// D * Q K^T, lower `[c, c]`.
    pub(super) attention: Vec<f32>,
    /// K S, then Q S `[2c, Dv]`.
    pub(super) reads: Vec<f32>,
    /// u `[c, Dv]`.
    pub(super) writes: Vec<f32>,
    /// o `[c, Dv]`.
    pub(super) outputs: Vec<f32>,
    /// silu of the gates `[c, Dv]`.
    pub(super) gated: Vec<f32>,
    /// 1 / rms `[c]` of the outputs.
    pub(super) scales: Vec<f32>,
    /// The output after norm and gate `[c, Dv]`.
    pub(super) y: Vec<f32>,
    /// S before the chunk `[Dk, Dv]`.
    pub(super) state: Vec<f32>,
}

impl ValueChunk {
    /// Computes value head `r` of `head`, and replaces the `state` before the chunk by the one after it.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        head: &Head<'_>,
        rows: &Range<usize>,
        r: usize,
        keys_queries: &[f32],
        products: &[f32],
        values: Vec<f32>,
        decays: Decays,
        state: &mut [f32],
    ) -> Self {
        let (gemm, isa, c) = (head.gemm, head.gemm.isa(), rows.len());
        let (width, wide) = (head.heads.key_width, head.heads.value_width);
        let before = state.to_vec();
        let mut reads = vec![0.0; 2 * c * wide];
        let by_columns = Operand::new(keys_queries, width, KAxis::Columns);
        let state_operand = Operand::new(&before, wide, KAxis::Rows);
        multiply_here(gemm, &by_columns, &state_operand, &mut MatMut::new(&mut reads, 2 * c, wide, wide), false);

        let [mut between, mut system, mut attention] = [(); 3].map(|()| vec![0.0; c * c]);
        triangles(isa, &decays.sums, &decays.strengths, products, &mut between, &mut system, &mut attention);
        let (key_reads, query_reads) = reads.split_at(c * wide);
        let mut writes = values.clone();
        for (i, (write, read)) in writes.chunks_exact_mut(wide).zip(key_reads.chunks_exact(wide)).enumerate() {
            let (strength, decay) = (decays.strengths[i], decays.from_start[i]);
            write.iter_mut().zip(read).for_each(|(write, read)| *write = strength * (*write - decay * read));
        }
        solve(isa, &system, c, wide, &mut writes);

        let mut outputs = query_reads.to_vec();
        for (output, decay) in outputs.chunks_exact_mut(wide).zip(&decays.from_start) {
            output.iter_mut().for_each(|output| *output *= decay);
        }
        let write_operand = Operand::new(&writes, wide, KAxis::Rows);
        let mut out = MatMut::new(&mut outputs, c, wide, wide);
        multiply_here(gemm, &Operand::new(&attention, c, KAxis::Columns), &write_operand, &mut out, true);

        let decay = decays.whole();
        state.iter_mut().for_each(|state| *state *= decay);
        let keys = decayed_keys(keys_queries, width, &decays);
        let mut out = MatMut::new(state, width, wide, wide);
        multiply_here(gemm, &Operand::new(&keys, width, KAxis::Rows), &write_operand, &mut out, true);

        let (mut gated, mut y, mut scales) = (vec![0.0; c * wide], outputs.clone(), vec![0.0; c]);
        let outputs_of_rows = y.chunks_exact_mut(wide).zip(gated.chunks_exact_mut(wide)).zip(&mut scales);
        for (row, ((y, gated), scale)) in rows.clone().zip(outputs_of_rows) {
            silu(isa, &head.part(row, 3)[r * wide..(r + 1) * wide], gated);
            let square = y.iter().map(|y| y * y).sum::<f32>() / wide as f32;
            *scale = 1.0 / (square + head.eps).sqrt();
            y.iter_mut().zip(head.norm).zip(gated).for_each(|((y, w), gate)| *y *= *scale * w * *gate);
        }
        Self { decays, values, between, system, attention, reads, writes, outputs, gated, scales, y, state: before }
    }
}

/// Returns exp(G_c - G) K `[c, Dk]`.
pub(super) fn decayed_keys(keys_queries: &[f32], width: usize, decays: &Decays) -> Vec<f32> {
    let keys = keys_queries.chunks_exact(width).zip(&decays.to_end);
    keys.flat_map(|(key, decay)| key.iter().map(move |key| key * decay)).collect()
}

simd_dispatch! {
    /// Computes D, A and D * Q K^T `[c, c]` from G and b `[c]` and the products of keys, then queries, with keys `[2c, c]`.
    fn triangles(
        sums: &[f64], strengths: &[f32], products: &[f32], between: &mut [f32], system: &mut [f32], attention: &mut [f32],
    ) = triangles_body
}

#[inline(always)]
fn triangles_body<M: MulAdd>(
    sums: &[f64],
    strengths: &[f32],
    products: &[f32],
    between: &mut [f32],
    system: &mut [f32],
    attention: &mut [f32],
) {
    let c = sums.len();
    let (key_products, query_products) = products.split_at(c * c);
    for i in 0..c {
        let row = i * c..i * c + i + 1;
        for (between, sum) in between[row.clone()].iter_mut().zip(sums) {
            *between = exp::<M>((sums[i] - sum) as f32).1;
        }
        let between = &between[row.clone()];
        for ((to, between), product) in system[row.clone()].iter_mut().zip(between).zip(&key_products[row.clone()]) {
            *to = strengths[i] * between * product;
        }
        system[i * c + i] = 0.0;
        for ((to, between), product) in attention[row.clone()].iter_mut().zip(between).zip(&query_products[row]) {
            *to = between * product;
        }
    }
}

simd_dispatch! {
    /// Solves (1 + A) u = r for u `[c, width]`, in place of r; A is strictly lower.
    fn solve(system: &[f32], c: usize, width: usize, values: &mut [f32]) = solve_body
}

#[inline(always)]
fn solve_body<M: MulAdd>(system: &[f32], c: usize, width: usize, values: &mut [f32]) {
    for i in 1..c {
        let (before, row) = values.split_at_mut(i * width);
        for (factor, before) in system[i * c..i * c + i].iter().zip(before.chunks_exact(width)) {
            for (value, before) in row[..width].iter_mut().zip(before) {
                *value = M::mul_add(-factor, *before, *value);
            }
        }
    }
}

simd_dispatch! {
    /// Solves (1 + A)^T r = u for r `[c, width]`, in place of u; A is strictly lower.
    pub(super) fn solve_transposed(system: &[f32], c: usize, width: usize, values: &mut [f32]) = solve_transposed_body
}

#[inline(always)]
fn solve_transposed_body<M: MulAdd>(system: &[f32], c: usize, width: usize, values: &mut [f32]) {
    for i in (1..c).rev() {
        let (before, row) = values.split_at_mut(i * width);
        for (factor, before) in system[i * c..i * c + i].iter().zip(before.chunks_exact_mut(width)) {
            for (before, value) in before.iter_mut().zip(&row[..width]) {
                *before = M::mul_add(-factor, *value, *before);
            }
        }
    }
}
