//! A key head with its value heads: its inputs, its convolution, and its chunks.

use super::chunk::{Decays, ValueChunk};
use super::{CHUNK, DeltaHeads, DeltaWeights};
use crate::arch::{MulAdd, simd_dispatch};
use crate::gemm::{Gemm, KAxis, MatMut};
use crate::layers::gated;
use crate::layers::product::{Operand, multiply_here};
use std::ops::Range;

/// The constant that the norms of queries and keys add to the sum of squares.
const NORM_EPS: f32 = 1e-6;

/// A key head of a Gated DeltaNet, and its input.
pub(super) struct Head<'a> {
    pub(super) gemm: Gemm,
    pub(super) heads: DeltaHeads,
    pub(super) columns: [Range<usize>; 6],
    /// The convolution `[L, channels of the head]`.
    pub(super) conv: Vec<f32>,
    /// `a_log` and `dt_bias` of the value heads.
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
    pub(super) norm: &'a [f32],
    pub(super) eps: f32,
    /// All rows.
    pub(super) x: &'a [f32],
}

/// Consecutive rows of one sequence.
pub(super) struct Sequence<'a> {
    pub(super) rows: Range<usize>,
    pub(super) before: Before<'a>,
}

/// The rows before a sequence, for its convolution.
pub(super) enum Before<'a> {
    /// Rows of the same input; may be empty.
    Rows(Range<usize>),
    /// The last L - 1 rows `[L - 1, C]`.
    Window(&'a [f32]),
}

impl Sequence<'_> {
    /// Returns the rows of each chunk.
    pub(super) fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let rows = self.rows.clone();
        let count = rows.len().div_ceil(CHUNK);
        (0..count).map(move |i| rows.start + i * CHUNK..rows.end.min(rows.start + (i + 1) * CHUNK))
    }

    /// Returns the index in the input of the row `back` rows before `row`, if it is there.
    fn earlier(&self, row: usize, back: usize) -> Option<usize> {
        if row - self.rows.start >= back {
            return Some(row - back);
        }
        let back = back - (row - self.rows.start);
        match &self.before {
            Before::Rows(rows) if rows.len() >= back => Some(rows.end - back),
            _ => None,
        }
    }
}

/// The intermediate values of a key head for the rows of a chunk, after its forward pass.
pub(super) struct Chunk {
    pub(super) rows: Range<usize>,
    /// The row of each input of the convolution, if it is in the input: L - 1 earlier rows, then the rows of the chunk.
    pub(super) sources: Vec<Option<usize>>,
    /// The inputs of the convolution `[L - 1 + c, channels of the head]`.
    pub(super) inputs: Vec<f32>,
    /// The convolution's outputs `[c, channels of the head]`, before SiLU.
    pub(super) mixed: Vec<f32>,
    /// Normalised keys, then normalised and scaled queries `[2c, Dk]`.
    pub(super) keys_queries: Vec<f32>,
    /// The reciprocal norms `[2c]` of keys, then of queries.
    pub(super) factors: Vec<f32>,
    /// Products with the transposed keys `[2c, c]`.
    pub(super) products: Vec<f32>,
    pub(super) values: Vec<ValueChunk>,
    value_width: usize,
}

impl Chunk {
    /// Writes the output `[c, R Dv]`.
    pub(super) fn write(&self, out: &mut [f32]) {
        let width = self.value_width;
        for (r, value) in self.values.iter().enumerate() {
            let rows = out.chunks_exact_mut(width * self.values.len()).zip(value.y.chunks_exact(width));
            rows.for_each(|(out, y)| out[r * width..(r + 1) * width].copy_from_slice(y));
        }
    }
}

impl<'a> Head<'a> {
    pub(super) fn new(gemm: Gemm, heads: DeltaHeads, weights: DeltaWeights<'a>, x: &'a [f32], k: usize) -> Self {
        let columns = heads.columns(k);
        let values = k * heads.per_key()..(k + 1) * heads.per_key();
        let channels = || columns[..3].iter().cloned().flatten();
        let conv =
            (0..heads.taps).flat_map(|tap| channels().map(move |channel| weights.conv[channel * heads.taps + tap]));
        Self {
            gemm,
            heads,
            conv: conv.collect(),
            a_log: &weights.a_log[values.clone()],
            dt_bias: &weights.dt_bias[values],
            norm: weights.norm,
            eps: weights.eps as f32,
            columns,
            x,
        }
    }

    /// Returns the number of channels of the head's convolution.
    pub(super) fn channels(&self) -> usize {
        self.columns[..3].iter().map(Range::len).sum()
    }

    /// Returns the part `part` of a row of the input.
    pub(super) fn part(&self, row: usize, part: usize) -> &'a [f32] {
        &self.x[row * self.heads.row()..(row + 1) * self.heads.row()][self.columns[part].clone()]
    }

    /// Computes the rows of a chunk, and replaces the states `[R, Dk, Dv]` before it by those after it.
    pub(super) fn chunk(&self, sequence: &Sequence<'_>, rows: Range<usize>, state: &mut [f32]) -> Chunk {
        let (isa, c, channels) = (self.gemm.isa(), rows.len(), self.channels());
        let (sources, inputs) = self.inputs(sequence, &rows);
        let mut mixed = vec![0.0; c * channels];
        let mut activated = vec![0.0; c * channels];
        convolve(isa, &inputs, &self.conv, channels, &mut mixed);
        silu(isa, &mixed, &mut activated);
        let (width, wide) = (self.heads.key_width, self.heads.value_width);
        let mut keys_queries = vec![0.0; 2 * c * width];
        let mut factors = vec![0.0; 2 * c];
        let scale = 1.0 / (width as f32).sqrt();
        for (i, row) in activated.chunks_exact(channels).enumerate() {
            let (query, rest) = row.split_at(width);
            for (at, vector, scale) in [(i, &rest[..width], 1.0), (c + i, query, scale)] {
                let factor = 1.0 / (vector.iter().map(|x| x * x).sum::<f32>() + NORM_EPS).sqrt();
                factors[at] = factor;
                let to = keys_queries[at * width..(at + 1) * width].iter_mut();
                to.zip(vector).for_each(|(to, x)| *to = x * factor * scale);
            }
        }
        let keys = &keys_queries[..c * width];
        let mut products = vec![0.0; 2 * c * c];
        let by_columns = |data| Operand::new(data, width, KAxis::Columns);
        let mut out = MatMut::new(&mut products, 2 * c, c, c);
        multiply_here(self.gemm, &by_columns(&keys_queries), &by_columns(keys), &mut out, false);
        let values = state.chunks_exact_mut(width * wide).enumerate().map(|(r, state)| {
            let values = activated.chunks_exact(channels).flat_map(|row| &row[2 * width + r * wide..][..wide]).copied();
            let decays = self.decays(&rows, r);
            ValueChunk::new(self, &rows, r, &keys_queries, &products, values.collect(), decays, state)
        });
        let values = values.collect();
        Chunk { rows, sources, inputs, mixed, factors, products, values, keys_queries, value_width: wide }
    }

    /// Returns the sources and the inputs of the convolution.
    fn inputs(&self, sequence: &Sequence<'_>, rows: &Range<usize>) -> (Vec<Option<usize>>, Vec<f32>) {
        let before = self.heads.taps - 1;
        let mut sources = Vec::with_capacity(before + rows.len());
        let mut inputs = Vec::with_capacity((before + rows.len()) * self.channels());
        for back in (1..=before).rev() {
            let source = sequence.earlier(rows.start, back);
            sources.push(source);
            match (source, &sequence.before) {
                (Some(row), _) => (0..3).for_each(|part| inputs.extend_from_slice(self.part(row, part))),
                (None, Before::Window(window)) => {
                    // The number of rows before the sequence.
                    let back = back - (rows.start - sequence.rows.start);
                    let row = &window[(before - back) * self.heads.channels()..][..self.heads.channels()];
                    self.columns[..3].iter().for_each(|columns| inputs.extend_from_slice(&row[columns.clone()]));
                }
                (None, Before::Rows(_)) => inputs.resize(inputs.len() + self.channels(), 0.0),
            }
        }
        for row in rows.clone() {
            sources.push(Some(row));
            (0..3).for_each(|part| inputs.extend_from_slice(self.part(row, part)));
        }
        (sources, inputs)
    }

    /// Returns strengths and decays of value head `r`.
    fn decays(&self, rows: &Range<usize>, r: usize) -> Decays {
        let rate = -self.a_log[r].exp();
        let strengths = rows.clone().map(|row| sigmoid(self.part(row, 4)[r])).collect();
        let logs = rows.clone().map(|row| rate * softplus(self.part(row, 5)[r] + self.dt_bias[r]));
        Decays::new(strengths, logs.collect())
    }
}

/// Returns 1 / (1 + e^-x).
pub(super) fn sigmoid(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
}

/// Returns log(1 + e^x).
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

simd_dispatch! {
    /// Computes a causal depthwise convolution `[c, channels]` of inputs `[L - 1 + c, channels]` with weights `[L, channels]`.
    fn convolve(inputs: &[f32], weights: &[f32], channels: usize, out: &mut [f32]) = convolve_body
}

#[inline(always)]
fn convolve_body<M: MulAdd>(inputs: &[f32], weights: &[f32], channels: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(channels).enumerate() {
        for (x, w) in inputs[i * channels..].chunks_exact(channels).zip(weights.chunks_exact(channels)) {
            for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
                *out = M::mul_add(*x, *w, *out);
            }
        }
    }
}

simd_dispatch! {
    /// Computes x sigmoid(x).
    pub(super) fn silu(x: &[f32], y: &mut [f32]) = silu_body
}

#[inline(always)]
fn silu_body<M: MulAdd>(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = x * gated::sigmoid::<M>(*x);
    }
}

simd_dispatch! {
    /// Multiplies dy by silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
    pub(super) fn silu_gradient(x: &[f32], dy: &mut [f32]) = silu_gradient_body
}

#[inline(always)]
fn silu_gradient_body<M: MulAdd>(x: &[f32], dy: &mut [f32]) {
    for (dy, x) in dy.iter_mut().zip(x) {
        let s = gated::sigmoid::<M>(*x);
        *dy *= s * M::mul_add(*x, 1.0 - s, 1.0);
    }
}
