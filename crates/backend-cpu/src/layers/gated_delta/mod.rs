//! Gated DeltaNet (arXiv 2412.06464) over packed sequences, in chunks.
//!
//! A value head has a state S `[Dk, Dv]`, which is zero before a sequence. Token t with query q, key k, value v, b = sigmoid of its
//! input and logarithm of the decay g computes
//!
//! ```text
//! S = exp(g_t) S
//! S = S + k_t (b_t (v_t - S^T k_t))^T
//! o_t = S^T q_t
//! ```
//!
//! For a chunk of c tokens, let G be the cumulative sums of g, S the state before it, D_ij = exp(G_i - G_j) for i >= j, and A the strictly
//! lower triangle of b_i D_ij (k_i k_j). The values u that the tokens write, and the outputs, are then products of matrices:
//!
//! ```text
//! (1 + A) u = b (v - exp(G) K S)           a triangular system
//! o         = exp(G) Q S + (D * Q K^T) u
//! S'        = exp(G_c) S + (exp(G_c - G) K)^T u
//! ```
//!
//! * Keys are stacked on queries, so that one product with S, and one with K^T, serve both.
//! * Key heads are independent: each is a task, which also computes the convolution of its channels and the norms of its value heads.
//! * Nothing but the input is saved for the backward pass, which computes the chunks of a key head again and keeps them until it has their
//!   gradients.
//! * A prompt's state is the first state of each of its completions, and its last rows precede theirs in the convolution. The gradients of
//!   both flow back into the prompt.
//!
//! Legend: N rows, Hk key heads, Hv value heads, R = Hv / Hk, Dk and Dv their widths, L taps of the convolution, C = 2 Hk Dk + Hv Dv its
//! channels, c rows of a chunk, T the rows of a sequence.

mod chunk;
mod gradient;
mod head;

use super::{Layers, Span, fits};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use head::{Before, Head, Sequence};
use std::ops::Range;

/// The maximum rows of a chunk, as in `transformers`.
const CHUNK: usize = 64;

/// The sizes of a Gated DeltaNet. A row of its input x has, before any activation, C channels of the convolution (queries of all key heads,
/// keys, values), then z `[Hv Dv]`, then b `[Hv]`, then a `[Hv]`:
///
/// ```text
/// q, k, v = silu(causal depthwise convolution)
/// q, k    = q / sqrt(|q|^2 + 1e-6) / sqrt(Dk), k / sqrt(|k|^2 + 1e-6)
/// beta    = sigmoid(b)
/// g       = -exp(a_log) softplus(a + dt_bias)
/// S       = exp(g) S
/// S       = S + k (beta (v - S^T k))^T
/// o       = S^T q
/// y       = norm * o / sqrt(mean(o^2) + eps) * silu(z)
/// ```
///
/// Legend: Hk key heads, Hv value heads, Dk and Dv their widths, C = 2 Hk Dk + Hv Dv; S is the state `[Dk, Dv]` of a value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Hk, the number of key heads.
    pub key: usize,
    /// Hv, the number of value heads; a multiple of Hk.
    pub value: usize,
    /// Dk, the width of a query and of a key.
    pub key_width: usize,
    /// Dv, the width of a value.
    pub value_width: usize,
    /// L, the number of rows that the convolution reads: a row and the rows before it.
    pub taps: usize,
}

impl DeltaHeads {
    /// Returns C, the channels of the convolution.
    pub fn channels(self) -> usize {
        2 * self.key * self.key_width + self.values()
    }

    /// Returns Hv Dv, the width of a row of the output.
    pub fn values(self) -> usize {
        self.value * self.value_width
    }

    /// Returns C + Hv Dv + 2 Hv, the width of a row of the input.
    pub fn row(self) -> usize {
        self.channels() + self.values() + 2 * self.value
    }

    /// Returns R, the value heads per key head.
    fn per_key(self) -> usize {
        self.value / self.key.max(1)
    }

    /// Returns the number of values of the states of a key head.
    fn key_state_len(self) -> usize {
        self.per_key() * self.key_width * self.value_width
    }

    /// Returns the columns of a row that key head `k` reads: query, key, values, z, b, a of [`DeltaHeads`].
    fn columns(self, k: usize) -> [Range<usize>; 6] {
        let (keys, values) = (self.key * self.key_width, self.values());
        let of = |first: usize, width: usize| first + k * width..first + (k + 1) * width;
        let (shared, wide) = (self.per_key(), self.per_key() * self.value_width);
        [
            of(0, self.key_width),
            of(keys, self.key_width),
            of(2 * keys, wide),
            of(2 * keys + values, wide),
            of(2 * keys + 2 * values, shared),
            of(2 * keys + 2 * values + self.value, shared),
        ]
    }
}

/// The weights of a Gated DeltaNet, without its input and output projection.
#[derive(Clone, Copy, Debug)]
pub struct DeltaWeights<'a> {
    /// Weights of the convolution `[C, L]`; the last column multiplies the current row.
    pub conv: &'a [f32],
    /// Logarithms of the decays' factors `[Hv]`.
    pub a_log: &'a [f32],
    /// The bias of the decays `[Hv]`.
    pub dt_bias: &'a [f32],
    /// The weight of the output's norm `[Dv]`.
    pub norm: &'a [f32],
    /// Epsilon of the output's norm.
    pub eps: f64,
}

/// The gradients of [`Layers::gated_delta_net`].
#[derive(Clone, Debug)]
pub struct DeltaGrad {
    /// dL/dx `[N, C + Hv Dv + 2 Hv]`.
    pub dx: Vec<f32>,
    /// dL/d([`DeltaWeights::conv`]).
    pub dconv: Vec<f32>,
    /// dL/d([`DeltaWeights::a_log`]).
    pub da_log: Vec<f32>,
    /// dL/d([`DeltaWeights::dt_bias`]).
    pub ddt_bias: Vec<f32>,
    /// dL/d([`DeltaWeights::norm`]).
    pub dnorm: Vec<f32>,
}

/// The recurrent state of a sequence, and the window of its convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaState {
    /// The inputs of the convolution of the last L - 1 rows `[L - 1, C]`; zeros before the sequence.
    window: Vec<f32>,
    /// The states `[Hv, Dk, Dv]`.
    states: Vec<f32>,
}

impl DeltaState {
    /// Returns the state before a sequence.
    pub fn new(heads: DeltaHeads) -> Self {
        Self {
            window: vec![0.0; (heads.taps - 1) * heads.channels()],
            states: vec![0.0; heads.key * heads.key_state_len()],
        }
    }

    /// Appends the inputs of the convolution of further rows.
    fn push(&mut self, x: &[f32], heads: DeltaHeads) {
        let (channels, kept) = (heads.channels(), heads.taps - 1);
        for row in x.chunks_exact(heads.row()).rev().take(kept).rev() {
            self.window.drain(..channels);
            self.window.extend_from_slice(&row[..channels]);
        }
    }
}

/// The states `[R, Dk, Dv]` of a key head after each span.
type SpanStates = Vec<Vec<f32>>;

/// Checks sizes and weights.
fn check(heads: DeltaHeads, weights: DeltaWeights<'_>) -> Result<()> {
    let sizes = [heads.key, heads.value, heads.key_width, heads.value_width, heads.taps];
    if sizes.contains(&0) || !heads.value.is_multiple_of(heads.key) {
        let expected = "sizes above 0, and a multiple of the key heads as value heads";
        return Err(Error::shape("gated_delta_net", "heads", expected, format!("{heads:?}")));
    }
    fits("gated_delta_net", "conv", weights.conv.len(), &[heads.channels(), heads.taps])?;
    fits("gated_delta_net", "a_log", weights.a_log.len(), &[heads.value])?;
    fits("gated_delta_net", "dt_bias", weights.dt_bias.len(), &[heads.value])?;
    fits("gated_delta_net", "norm", weights.norm.len(), &[heads.value_width])
}

/// Returns the index of the span that is the prefix of each span, if it has one.
fn parents(spans: &[Span]) -> Result<Vec<Option<usize>>> {
    let mut end = 0;
    let parent = |(index, span): (usize, &Span)| {
        let ordered = span.rows.start == end && span.rows.end >= end;
        end = span.rows.end;
        let is_parent = |earlier: &Span| earlier.rows == span.prefix && earlier.prefix.is_empty();
        let parent = if span.prefix.is_empty() { None } else { spans[..index].iter().position(is_parent) };
        if !ordered || parent.is_none() && !span.prefix.is_empty() {
            let expected = format!(
                "rows from {} on, with the rows of an earlier span without a prefix as prefix, or none",
                span.rows.start
            );
            return Err(Error::shape("gated_delta_net", "spans", expected, format!("{span:?}")));
        }
        Ok(parent)
    };
    spans.iter().enumerate().map(parent).collect()
}

impl Layers {
    /// Computes the gated and normalised output `[N, Hv Dv]` of a Gated DeltaNet from its projected input x `[N, C + Hv Dv + 2 Hv]`. The
    /// spans must cover all rows, in order; a prefix is the whole of an earlier span, which has no prefix itself. State and convolution start at zero in every span
    /// without a prefix.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows, weights, heads or spans do not match.
    pub fn gated_delta_net(
        &self,
        x: &[f32],
        heads: DeltaHeads,
        weights: DeltaWeights<'_>,
        spans: &[Span],
    ) -> Result<Vec<f32>> {
        Ok(self.forward(x, heads, weights, spans, false)?.0)
    }

    /// As [`Layers::gated_delta_net`], and also returns the state after each span.
    ///
    /// # Errors
    /// As [`Layers::gated_delta_net`].
    pub fn gated_delta_net_states(
        &self,
        x: &[f32],
        heads: DeltaHeads,
        weights: DeltaWeights<'_>,
        spans: &[Span],
    ) -> Result<(Vec<f32>, Vec<DeltaState>)> {
        let (y, states) = self.forward(x, heads, weights, spans, true)?;
        let state = |(index, span): (usize, &Span)| {
            let mut all = DeltaState::new(heads);
            for (k, states) in states.iter().enumerate() {
                all.states[k * heads.key_state_len()..(k + 1) * heads.key_state_len()].copy_from_slice(&states[index]);
            }
            for rows in [&span.prefix, &span.rows] {
                all.push(&x[rows.start * heads.row()..rows.end * heads.row()], heads);
            }
            all
        };
        Ok((y, spans.iter().enumerate().map(state).collect()))
    }

    /// Returns the output, and, if `keeps`, the state of each key head after each span.
    fn forward(
        &self,
        x: &[f32],
        heads: DeltaHeads,
        weights: DeltaWeights<'_>,
        spans: &[Span],
        keeps: bool,
    ) -> Result<(Vec<f32>, Vec<SpanStates>)> {
        check(heads, weights)?;
        let (parents, n) = (parents(spans)?, spans.last().map_or(0, |span| span.rows.end));
        fits("gated_delta_net", "x", x.len(), &[n, heads.row()])?;
        let wide = heads.per_key() * heads.value_width;
        let mut tasks: Vec<(Vec<f32>, SpanStates)> =
            (0..heads.key).map(|_| (vec![0.0; n * wide], Vec::new())).collect();
        tasks.par_chunks_mut(1).enumerate().for_each(|(k, task)| {
            let head = Head::new(self.gemm, heads, weights, x, k);
            let (part, states) = &mut task[0];
            for (index, (span, parent)) in spans.iter().zip(&parents).enumerate() {
                let zeros = || vec![0.0; heads.key_state_len()];
                let mut state = parent.map_or_else(zeros, |parent: usize| states[parent].clone());
                let sequence = Sequence { rows: span.rows.clone(), before: Before::Rows(span.prefix.clone()) };
                for rows in sequence.chunks() {
                    let out = &mut part[rows.start * wide..rows.end * wide];
                    head.chunk(&sequence, rows, &mut state).write(out);
                }
                let is_parent = parents.contains(&Some(index));
                states.push(if keeps || is_parent { state } else { Vec::new() });
            }
        });
        let (parts, states): (Vec<_>, Vec<_>) = tasks.into_iter().unzip();
        Ok((side_by_side(&parts, n, wide), states))
    }

    /// Continues sequences by further rows: `lengths` counts the rows of each in x `[N, C + Hv Dv + 2 Hv]`, and `states` has its state, which
    /// is updated. Returns the output `[N, Hv Dv]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows, weights, heads, lengths or states do not match.
    pub fn gated_delta_net_continued(
        &self,
        x: &[f32],
        heads: DeltaHeads,
        weights: DeltaWeights<'_>,
        lengths: &[usize],
        states: &mut [&mut DeltaState],
    ) -> Result<Vec<f32>> {
        check(heads, weights)?;
        let n = lengths.iter().sum();
        fits("gated_delta_net_continued", "x", x.len(), &[n, heads.row()])?;
        fits("gated_delta_net_continued", "states", states.len(), &[lengths.len()])?;
        for state in states.iter() {
            fits("gated_delta_net_continued", "window", state.window.len(), &[heads.taps - 1, heads.channels()])?;
            fits("gated_delta_net_continued", "states", state.states.len(), &[heads.key, heads.key_state_len()])?;
        }
        // Heads as prepared for all sequences.
        let all: Vec<Head<'_>> = (0..heads.key).map(|k| Head::new(self.gemm, heads, weights, x, k)).collect();
        let (wide, mut first, mut tasks) = (heads.per_key() * heads.value_width, 0, Vec::new());
        for (length, state) in lengths.iter().zip(states.iter_mut()) {
            let (rows, DeltaState { window, states }) = (first..first + length, &mut **state);
            let window = &window[..];
            for (k, state) in states.chunks_exact_mut(heads.key_state_len()).enumerate() {
                tasks.push((k, rows.clone(), window, state, vec![0.0; length * wide]));
            }
            first += length;
        }
        tasks.par_chunks_mut(1).for_each(|tasks| {
            for (k, rows, window, state, out) in tasks {
                let sequence = Sequence { rows: rows.clone(), before: Before::Window(window) };
                for part in sequence.chunks() {
                    let part_range = (part.start - rows.start) * wide..(part.end - rows.start) * wide;
                    all[*k].chunk(&sequence, part, state).write(&mut out[part_range]);
                }
            }
        });
        let mut y = vec![0.0; n * heads.values()];
        for (k, rows, .., out) in &tasks {
            for (row, out) in rows.clone().zip(out.chunks_exact(wide)) {
                y[row * heads.values() + k * wide..][..wide].copy_from_slice(out);
            }
        }
        drop(tasks);
        let mut rows = x;
        for (length, state) in lengths.iter().zip(states) {
            let sequence_rows;
            (sequence_rows, rows) = rows.split_at(length * heads.row());
            state.push(sequence_rows, heads);
        }
        Ok(y)
    }

    /// Computes the gradients of [`Layers::gated_delta_net`] from its input and dy `[N, Hv Dv]`.
    ///
    /// # Errors
    /// As [`Layers::gated_delta_net`].
    pub fn gated_delta_net_grad(
        &self,
        x: &[f32],
        heads: DeltaHeads,
        weights: DeltaWeights<'_>,
        spans: &[Span],
        dy: &[f32],
    ) -> Result<DeltaGrad> {
        check(heads, weights)?;
        let (parents, n) = (parents(spans)?, spans.last().map_or(0, |span| span.rows.end));
        fits("gated_delta_net_grad", "x", x.len(), &[n, heads.row()])?;
        fits("gated_delta_net_grad", "dy", dy.len(), &[n, heads.values()])?;
        let mut tasks: Vec<_> = (0..heads.key).map(|_| None).collect();
        tasks.par_chunks_mut(1).enumerate().for_each(|(k, task)| {
            let head = Head::new(self.gemm, heads, weights, x, k);
            task[0] = Some(head.gradients(spans, &parents, dy));
        });
        let mut all = DeltaGrad {
            dx: vec![0.0; x.len()],
            dconv: vec![0.0; weights.conv.len()],
            da_log: Vec::with_capacity(heads.value),
            ddt_bias: Vec::with_capacity(heads.value),
            dnorm: vec![0.0; heads.value_width],
        };
        let parts: Vec<_> = tasks.into_iter().flatten().collect();
        all.dx.par_chunks_mut(heads.row()).enumerate().for_each(|(i, row)| {
            for (k, part) in parts.iter().enumerate() {
                let mut from = &part.dx[i * part.width..(i + 1) * part.width];
                for columns in heads.columns(k) {
                    let column_values;
                    (column_values, from) = from.split_at(columns.len());
                    row[columns].copy_from_slice(column_values);
                }
            }
        });
        for (k, part) in parts.iter().enumerate() {
            let [queries, keys, values, ..] = heads.columns(k);
            // A part has the taps of a channel in a column.
            let width = queries.len() + keys.len() + values.len();
            for (at, channel) in queries.chain(keys).chain(values).enumerate() {
                let to = all.dconv[channel * heads.taps..(channel + 1) * heads.taps].iter_mut();
                to.zip(part.dconv[at..].iter().step_by(width)).for_each(|(to, from)| *to = *from);
            }
            all.da_log.extend_from_slice(&part.da_log);
            all.ddt_bias.extend_from_slice(&part.ddt_bias);
            super::linear::add_to(self.gemm.isa(), &part.dnorm, &mut all.dnorm);
        }
        Ok(all)
    }
}

/// Returns rows `[n, parts width]` of parts `[n, width]`.
fn side_by_side(parts: &[Vec<f32>], n: usize, width: usize) -> Vec<f32> {
    let mut rows = vec![0.0; n * parts.len() * width];
    rows.par_chunks_mut((parts.len() * width).max(1)).enumerate().for_each(|(i, row)| {
        for (to, part) in row.chunks_exact_mut(width).zip(parts) {
            to.copy_from_slice(&part[i * width..(i + 1) * width]);
        }
    });
    rows
}

#[cfg(test)]
mod tests;
