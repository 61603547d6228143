//! Causal grouped-query attention (arXiv 2305.13245) over packed sequences.
//!
//! There is no padding, and keys and values are not repeated per query head. Scores exist for one tile of queries at a
//! time: the backward pass recomputes them from the log-sum-exp of each row (arXiv 2205.14135).

mod tiles;

use super::product::{Operand, multiply_here};
use super::scratch::Scratch;
use super::{Layers, fits, linear::add_to};
use crate::arch::{MulAdd, simd_dispatch};
use crate::gemm::{KAxis, MatMut};
use crate::softmax::exp;
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::ops::Range;
use tiles::{Tile, groups, tiles};

/// The heads of an attention layer. A row of queries, keys and values has A, K and K heads of D entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// A, the number of query heads; a multiple of K.
    pub query: usize,
    /// K, the number of key heads and of value heads.
    pub key_value: usize,
    /// D, the width of a head.
    pub width: usize,
}

impl Heads {
    /// Returns (A + 2K) D, the width of a row of queries, keys and values.
    pub fn row(self) -> usize {
        (self.query + 2 * self.key_value) * self.width
    }

    /// Returns R = A / K, the query heads per key head.
    pub(super) fn per_key_head(self) -> usize {
        self.query / self.key_value.max(1)
    }

    /// Returns the columns of query head `a`.
    pub(super) fn queries(self, a: usize) -> Range<usize> {
        a * self.width..(a + 1) * self.width
    }

    /// Returns the columns of key head `k`.
    pub(super) fn keys(self, k: usize) -> Range<usize> {
        self.queries(self.query + k)
    }

    /// Returns the columns of value head `k`.
    pub(super) fn values(self, k: usize) -> Range<usize> {
        self.queries(self.query + self.key_value + k)
    }
}

/// Which scores of queries and keys count, and their scale.
///
/// ```
/// use grpo_backend_cpu::layers::Scores;
///
/// // Each row attends to itself and to the 511 rows before it.
/// let sliding = Scores { window: Some(512), ..Scores::default() };
/// # let _ = sliding;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// The factor of scores; `None` is 1 / sqrt(D).
    pub scale: Option<f32>,
    /// The number of rows that a row attends to, its own included; `None` is all earlier rows of its sequence.
    pub window: Option<usize>,
}

impl Scores {
    /// Returns the factor of scores of these heads.
    pub(super) fn scale(self, heads: Heads) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (heads.width as f32).sqrt())
    }

    /// Returns the first of `visible` keys, which end with the query's own, that is inside the window.
    pub(super) fn first(self, visible: usize) -> usize {
        self.window.map_or(0, |window| visible.saturating_sub(window))
    }
}

/// A sequence with an optional prefix: each row attends to itself, to earlier rows of the span, and to the whole
/// prefix.
///
/// ```
/// use grpo_backend_cpu::layers::Span;
///
/// // A prompt of three tokens and two completions of it, which share its keys and values.
/// let prompt = Span { rows: 0..3, prefix: 0..0 };
/// let completions = [Span { rows: 3..5, prefix: 0..3 }, Span { rows: 5..9, prefix: 0..3 }];
/// # let _ = (prompt, completions);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The rows of the span.
    pub rows: Range<usize>,
    /// The earlier rows that all rows of the span attend to; may be empty.
    pub prefix: Range<usize>,
}

/// The results of attention.
#[derive(Clone, Debug)]
pub struct Mixed {
    /// For each head, the mean of the values `[N, A D]`, weighted by the attention probabilities.
    pub values: Vec<f32>,
    /// The log-sum-exp of each head's scores `[N, A]`.
    pub lse: Vec<f32>,
}

impl Mixed {
    /// Adds sinks: a head's softmax gets one more entry, the logit of its sink `[A]`, without a value. Returns the factors `[N, A]` of the
    /// values, the probability of all other entries.
    ///
    /// The backward pass of attention with sinks is that of attention without: `values` are these values, and `dvalues` is dL/d(these
    /// values) times the factors. The gradient of a sink is minus the sum over rows of (1 - factor) times the product of both.
    ///
    /// # Errors
    /// [`Error::Shape`] if `sinks` is not `[A]`.
    pub fn add_sinks(&mut self, heads: Heads, sinks: &[f32]) -> Result<Vec<f32>> {
        fits("add_sinks", "sinks", sinks.len(), &[heads.query])?;
        let factor = |(lse, sink): (&f32, &f32)| 1.0 / (1.0 + (sink - lse).exp());
        let factors: Vec<f32> = self.lse.iter().zip(sinks.iter().cycle()).map(factor).collect();
        for (head, factor) in self.values.chunks_exact_mut(heads.width).zip(&factors) {
            head.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(factors)
    }
}

/// The inputs of the backward pass of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad<'a> {
    /// The queries, keys and values `[N, (A + 2K) D]`.
    pub qkv: &'a [f32],
    /// [`Mixed::values`].
    pub values: &'a [f32],
    /// [`Mixed::lse`].
    pub lse: &'a [f32],
    /// dL/d[`Mixed::values`].
    pub dvalues: &'a [f32],
}

/// Checks that the spans cover all rows in order, and that prefixes precede their spans.
fn check(qkv: &[f32], heads: Heads, scores: Scores, spans: &[Span]) -> Result<usize> {
    if heads.key_value == 0 || heads.width == 0 || !heads.query.is_multiple_of(heads.key_value) {
        return Err(Error::shape("attention", "heads", "a multiple of the key/value heads", format!("{heads:?}")));
    }
    if scores.window == Some(0) {
        return Err(Error::shape("attention", "window", "at least 1", 0));
    }
    let mut end = 0;
    for span in spans {
        let ordered = span.rows.start == end && span.rows.end >= end;
        if !ordered || span.prefix.start > span.prefix.end || span.prefix.end > span.rows.start {
            let expected = format!("rows from {end} on, with a prefix that ends before them");
            return Err(Error::shape("attention", "spans", expected, format!("{span:?}")));
        }
        end = span.rows.end;
    }
    fits("attention", "qkv", qkv.len(), &[end, heads.row()])?;
    Ok(end)
}

impl Layers {
    /// Computes attention of `qkv: [N, (A + 2K) D]`, whose queries and keys have been rotated. The spans must cover all
    /// rows, in order. Keys before the windows of all queries of a tile cost nothing.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows, heads or spans do not match, or the window is 0.
    pub fn attention(&self, qkv: &[f32], heads: Heads, scores: Scores, spans: &[Span]) -> Result<Mixed> {
        let n = check(qkv, heads, scores, spans)?;
        let width = heads.query * heads.width;
        let mut mixed = Mixed { values: vec![0.0; n * width], lse: vec![0.0; n * heads.query] };
        let (mut values, mut lse) = (&mut mixed.values[..], &mut mixed.lse[..]);
        let mut tasks = Vec::new();
        for (span, rows) in tiles(spans) {
            let tile_values;
            let tile_lse;
            (tile_values, values) = values.split_at_mut(rows.len() * width);
            (tile_lse, lse) = lse.split_at_mut(rows.len() * heads.query);
            tasks.push((span, rows, tile_values, tile_lse));
        }
        tasks.par_chunks_mut(1).for_each(|tasks| {
            for (span, rows, values, lse) in tasks {
                self.attention_tile(qkv, heads, &Tile::new(span, rows.clone(), scores), values, lse);
            }
        });
        Ok(mixed)
    }

    fn attention_tile(&self, qkv: &[f32], heads: Heads, tile: &Tile, values: &mut [f32], lse: &mut [f32]) {
        let (d, s, row, width) = (heads.width, tile.keys.len(), heads.row(), heads.query * heads.width);
        let scale = tile.scores.scale(heads);
        let mut scores = Scratch::words(tile.rows.len() * s);
        let scores = scores.floats();
        for k in 0..heads.key_value {
            let keys = tile.of_keys(qkv, row, heads.keys(k), KAxis::Columns);
            let value_rows = tile.of_keys(qkv, row, heads.values(k), KAxis::Rows);
            for a in k * heads.per_key_head()..(k + 1) * heads.per_key_head() {
                let queries = tile.of_rows(qkv, row, heads.queries(a), KAxis::Columns);
                multiply_here(self.gemm, &queries, &keys, &mut MatMut::new(scores, tile.rows.len(), s, s), false);
                let lse = &mut lse[a..];
                let window = tile.scores.window.unwrap_or(s);
                softmax(self.gemm.isa(), scores, s, tile.first(), window, scale, lse, heads.query);
                let mut out = MatMut::new(&mut values[a * d..], tile.rows.len(), d, width);
                multiply_here(self.gemm, &Operand::new(scores, s, KAxis::Columns), &value_rows, &mut out, false);
            }
        }
    }

    /// Computes dL/d(qkv) `[N, (A + 2K) D]` of [`Layers::attention`].
    ///
    /// # Errors
    /// As [`Layers::attention`].
    pub fn attention_grad(
        &self,
        of: AttentionGrad<'_>,
        heads: Heads,
        scores: Scores,
        spans: &[Span],
    ) -> Result<Vec<f32>> {
        let n = check(of.qkv, heads, scores, spans)?;
        let width = heads.query * heads.width;
        fits("attention_grad", "values", of.values.len(), &[n, width])?;
        fits("attention_grad", "dvalues", of.dvalues.len(), &[n, width])?;
        fits("attention_grad", "lse", of.lse.len(), &[n, heads.query])?;
        let (d, r, row) = (heads.width, heads.per_key_head(), heads.row());
        let groups = groups(spans);
        // Separate buffers for the queries, keys and values of each key head of each group, which run in parallel.
        let head_len = (r + 2) * d;
        let mut parts = vec![0.0; n * row];
        let (mut rest, mut tasks) = (&mut parts[..], Vec::new());
        for (group, k) in groups.iter().flat_map(|group| (0..heads.key_value).map(move |k| (group, k))) {
            let part;
            (part, rest) = rest.split_at_mut(group.rows.len() * head_len);
            tasks.push((group, k, part));
        }
        tasks.par_chunks_mut(1).for_each(|tasks| {
            for (group, k, part) in tasks {
                let n = group.rows.len();
                let (dqueries, rest) = part.split_at_mut(n * r * d);
                let (dkeys, dvalues) = rest.split_at_mut(n * d);
                for (span, rows) in tiles(group.spans) {
                    let tile = Tile::new(span, rows, scores);
                    self.attention_grad_tile(&of, heads, *k, &tile, group.rows.start, [dqueries, dkeys, dvalues]);
                }
            }
        });
        let mut dqkv = vec![0.0; n * row];
        dqkv.par_chunks_mut(row).enumerate().for_each(|(i, to)| {
            let rows = &groups[groups.partition_point(|group| group.rows.end <= i)].rows;
            let (n, i) = (rows.len(), i - rows.start);
            for (k, part) in parts[rows.start * row..rows.end * row].chunks_exact(n * head_len).enumerate() {
                let (dqueries, rest) = part.split_at(n * r * d);
                let (dkeys, dvalues) = rest.split_at(n * d);
                to[k * r * d..(k + 1) * r * d].copy_from_slice(&dqueries[i * r * d..(i + 1) * r * d]);
                to[heads.keys(k)].copy_from_slice(&dkeys[i * d..(i + 1) * d]);
                to[heads.values(k)].copy_from_slice(&dvalues[i * d..(i + 1) * d]);
            }
        });
        Ok(dqkv)
    }

    /// Adds the tile's part to the gradients of key head `k` in rows from `first` on: queries `[N, R, D]`, keys and values `[N, D]`.
    fn attention_grad_tile(
        &self,
        of: &AttentionGrad<'_>,
        heads: Heads,
        k: usize,
        tile: &Tile,
        first: usize,
        to: [&mut [f32]; 3],
    ) {
        let (gemm, isa) = (self.gemm, self.gemm.isa());
        let (d, r, row, width) = (heads.width, heads.per_key_head(), heads.row(), heads.query * heads.width);
        let (t, s) = (tile.rows.len(), tile.keys.len());
        let scale = tile.scores.scale(heads);
        let [dqueries, dkeys, dvalues] = to;
        let mut buffers = Scratch::words(2 * t * s + 2 * s * d);
        let (p, rest) = buffers.floats().split_at_mut(t * s);
        let (ds, rest) = rest.split_at_mut(t * s);
        let (dkeys_tile, dvalues_tile) = rest.split_at_mut(s * d);

        let keys = tile.of_keys(of.qkv, row, heads.keys(k), KAxis::Columns);
        let keys_by_row = tile.of_keys(of.qkv, row, heads.keys(k), KAxis::Rows);
        let values = tile.of_keys(of.qkv, row, heads.values(k), KAxis::Columns);
        for head in 0..r {
            let a = k * r + head;
            let queries = tile.of_rows(of.qkv, row, heads.queries(a), KAxis::Columns);
            let queries_by_row = tile.of_rows(of.qkv, row, heads.queries(a), KAxis::Rows);
            let dout = tile.of_rows(of.dvalues, width, heads.queries(a), KAxis::Columns);
            let dout_by_row = tile.of_rows(of.dvalues, width, heads.queries(a), KAxis::Rows);
            multiply_here(gemm, &queries, &keys, &mut MatMut::new(p, t, s, s), false);
            multiply_here(gemm, &dout, &values, &mut MatMut::new(ds, t, s, s), false);
            for (i, row) in tile.rows.clone().enumerate() {
                let head_range = row * width + a * d..row * width + (a + 1) * d;
                let visible = tile.visible(i);
                let (p, ds) = (&mut p[i * s..(i + 1) * s], &mut ds[i * s..(i + 1) * s]);
                let lse = of.lse[row * heads.query + a];
                score_gradient(
                    isa,
                    p,
                    ds,
                    visible,
                    scale,
                    lse,
                    &of.values[head_range.clone()],
                    &of.dvalues[head_range],
                );
            }
            let (p, ds) = (&*p, &*ds);
            let mut out = MatMut::new(&mut dqueries[((tile.rows.start - first) * r + head) * d..], t, d, r * d);
            multiply_here(gemm, &Operand::new(ds, s, KAxis::Columns), &keys_by_row, &mut out, false);
            let mut out = MatMut::new(dkeys_tile, s, d, d);
            multiply_here(gemm, &Operand::new(ds, s, KAxis::Rows), &queries_by_row, &mut out, head > 0);
            let mut out = MatMut::new(dvalues_tile, s, d, d);
            multiply_here(gemm, &Operand::new(p, s, KAxis::Rows), &dout_by_row, &mut out, head > 0);
        }
        for (i, key) in tile.keys.iter().map(|key| key - first).enumerate() {
            add_to(isa, &dkeys_tile[i * d..(i + 1) * d], &mut dkeys[key * d..(key + 1) * d]);
            add_to(isa, &dvalues_tile[i * d..(i + 1) * d], &mut dvalues[key * d..(key + 1) * d]);
        }
    }
}

simd_dispatch! {
    /// Softmax of `scale` times the last `window` of the first entries of each row, `first` in row 0 and one more in
    /// each further row; the rest becomes 0. `lse[i * stride]` gets the log-sum-exp of row i.
    #[allow(clippy::too_many_arguments)]
    fn softmax(
        scores: &mut [f32], columns: usize, first: usize, window: usize, scale: f32, lse: &mut [f32], stride: usize,
    ) = softmax_body
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn softmax_body<M: MulAdd>(
    scores: &mut [f32],
    columns: usize,
    first: usize,
    window: usize,
    scale: f32,
    lse: &mut [f32],
    stride: usize,
) {
    for (i, row) in scores.chunks_exact_mut(columns).enumerate() {
        let (row, hidden) = row.split_at_mut(first + i);
        hidden.fill(0.0);
        let (before, row) = row.split_at_mut((first + i).saturating_sub(window));
        before.fill(0.0);
        lse[i * stride] = softmax_row::<M>(row, scale);
    }
}

/// The number of independent sums.
const LANES: usize = 16;

/// Returns min(x, 0), and NaN for NaN: after rounding, the maximal score may exceed the maximum.
#[inline(always)]
fn below_zero(x: f32) -> f32 {
    if x > 0.0 { 0.0 } else { x }
}

/// Replaces scores by probabilities and returns the logarithm of the sum of e^(scale x). A NaN makes all of them NaN.
#[inline(always)]
pub(super) fn softmax_row<M: MulAdd>(row: &mut [f32], scale: f32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = lane.max(*x);
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    let shift = -scale * max;
    let mut sums = [0.0_f32; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = exp::<M>(below_zero(M::mul_add(*x, scale, shift))).1;
            *sum += *x;
        }
    }
    let mut sum = 0.0;
    for x in rest {
        *x = exp::<M>(below_zero(M::mul_add(*x, scale, shift))).1;
        sum += *x;
    }
    let sum = sums.iter().fold(sum, |sum, lane| sum + lane);
    let factor = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= factor);
    scale * max + sum.ln()
}

simd_dispatch! {
    /// Computes, from scores `p` and dL/dp `ds` of a query, its probabilities and dL/d(unscaled score) = scale p (dp -
    /// sum of p dp), where the sum of p dp equals the sum of values times dvalues. Entries outside the `visible` keys become 0.
    #[allow(clippy::too_many_arguments)]
    fn score_gradient(
        p: &mut [f32], ds: &mut [f32], visible: Range<usize>, scale: f32, lse: f32, values: &[f32], dvalues: &[f32],
    ) = score_gradient_body
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn score_gradient_body<M: MulAdd>(
    p: &mut [f32],
    ds: &mut [f32],
    visible: Range<usize>,
    scale: f32,
    lse: f32,
    values: &[f32],
    dvalues: &[f32],
) {
    let sum: f32 = values.iter().zip(dvalues).map(|(v, d)| v * d).sum();
    for (p, ds) in p[visible.clone()].iter_mut().zip(&mut ds[visible.clone()]) {
        *p = exp::<M>(below_zero(M::mul_add(*p, scale, -lse))).1;
        *ds = scale * *p * (*ds - sum);
    }
    for part in [p, ds] {
        part[..visible.start].fill(0.0);
        part[visible.end..].fill(0.0);
    }
}
