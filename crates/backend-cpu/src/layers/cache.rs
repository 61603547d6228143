//! The KV cache of earlier positions, and the attention of one new position per sample.
//!
//! The samples of a prompt share its keys and values, and finished samples need no work. A layer with a sliding window stores the positions
//! inside the window only: of a prompt its last ones, and of a sample a ring, in which a new position replaces the one that leaves the
//! window.
//!
//! A block of positions has the layout
//!
//! * keys `[K, panels, D, 16]`: a panel has 16 positions, and the last panel the remaining ones, `[D, positions % 16]`;
//! * values `[K, positions, D]`.
//!
//! The query heads of a key head read both from start to end.

use super::attention::{Heads, Mixed, Scores, Span, softmax_row};
use super::{Layers, fits};
use crate::arch::strip::{self, ROWS, Strided, Strip, VECTOR};
use crate::arch::{IsaToken, MulAdd, simd_dispatch};
use crate::pages::output;
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// The least multiply-adds of a task of attention, a few microseconds.
const GROUP_PRODUCTS: usize = 1 << 17;

/// The keys and values of prompts, and of their completions during sampling.
///
/// A layer with a window of W positions stores at most W - 1 positions of a prompt and W positions of a sample.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Layer>,
    /// The number of tokens of each prompt.
    prompts: Vec<usize>,
    /// The number of samples per prompt; samples of one prompt are contiguous.
    per_prompt: usize,
    /// The maximum positions of a sample.
    capacity: usize,
    /// The filled positions of each sample.
    filled: Vec<usize>,
}

/// A layer's keys and values in blocks; the [module](self) has their layout.
#[derive(Debug)]
struct Layer {
    heads: Heads,
    scores: Scores,
    /// One block per prompt, with its last positions.
    prompts: Vec<f32>,
    /// The index of the first value of each prompt's block in `prompts`, and the number of all values.
    starts: Vec<usize>,
    /// The number of prompts whose blocks are filled.
    stored: usize,
    /// One block per sample, with `slots` positions. Position i of the sample is in slot i modulo the number of slots.
    samples: Vec<f32>,
    /// The number of slots of a sample.
    slots: usize,
}

impl Layer {
    /// Returns the number of values of a position.
    fn position(&self) -> usize {
        2 * self.heads.key_value * self.heads.width
    }

    /// Returns the block of a prompt.
    fn prompt(&self, prompt: usize) -> &[f32] {
        &self.prompts[self.starts[prompt]..self.starts[prompt + 1]]
    }

    /// Returns the blocks of the next `count` prompts, which then count as stored.
    fn next_prompts(&mut self, count: usize) -> Vec<&mut [f32]> {
        let next = self.stored..self.stored + count;
        self.stored = next.end;
        let mut rest = &mut self.prompts[self.starts[next.start]..];
        let blocks = next.map(|prompt| {
            let block;
            (block, rest) = std::mem::take(&mut rest).split_at_mut(self.starts[prompt + 1] - self.starts[prompt]);
            block
        });
        blocks.collect()
    }

    /// Returns how many of the `length` positions before a new one the new one attends to.
    fn kept(&self, length: usize) -> usize {
        self.scores.window.map_or(length, |window| length.min(window.saturating_sub(1)))
    }

    /// Returns the parts of consecutive `positions` of a sample, in their order: of its prompt, which has `length` tokens, and of its own
    /// block before and after the end of the ring.
    fn parts<'a>(&self, length: usize, prompt: &'a [f32], own: &'a [f32], positions: Range<usize>) -> [Part<'a>; 3] {
        let kept = prompt.len() / self.position();
        let in_prompt = |position: usize| (position.min(length) + kept).saturating_sub(length);
        let prompt_range = in_prompt(positions.start)..in_prompt(positions.end);
        let count = positions.end.saturating_sub(positions.start.max(length));
        let start = positions.start.saturating_sub(length) % self.slots.max(1);
        let (older, newer) = (start..(start + count).min(self.slots), 0..(start + count).saturating_sub(self.slots));
        let own = |visible| Part { block: own, len: self.slots, visible };
        [Part { block: prompt, len: kept, visible: prompt_range }, own(older), own(newer)]
    }
}

impl KvCache {
    /// Creates an empty cache of layers with these heads and scores for prompts of the given lengths, with `per_prompt` samples of
    /// each, and `capacity` positions for every sample.
    pub fn new(layers: &[(Heads, Scores)], prompts: &[usize], per_prompt: usize, capacity: usize) -> Self {
        let samples = prompts.len() * per_prompt;
        let layer = |&(heads, scores): &(Heads, Scores)| {
            let slots = scores.window.map_or(capacity, |window| window.min(capacity));
            let mut layer =
                Layer { heads, scores, prompts: Vec::new(), starts: vec![0], stored: 0, samples: Vec::new(), slots };
            for length in prompts {
                layer.starts.push(layer.starts[layer.starts.len() - 1] + layer.kept(*length) * layer.position());
            }
            layer.prompts = output(layer.starts[prompts.len()]);
            layer.samples = output(samples * slots * layer.position());
            layer
        };
        let layers = layers.iter().map(layer).collect();
        Self { layers, prompts: prompts.to_vec(), per_prompt, capacity, filled: vec![0; samples] }
    }

    /// Creates a cache whose prompts are whole sequences of other caches of the same model, each given as its cache and the index of its
    /// sample, with one sample per prompt and `capacity` positions for every sample.
    ///
    /// # Errors
    /// [`Error::Shape`] for an index that is not below [`KvCache::samples`], or caches of other shapes.
    pub fn continued(sequences: &[(&KvCache, usize)], capacity: usize) -> Result<Self> {
        let of = |cache: &KvCache| cache.layers.iter().map(|layer| (layer.heads, layer.scores)).collect::<Vec<_>>();
        let Some(layers) = sequences.first().map(|(cache, _)| of(cache)) else {
            return Err(Error::shape("KvCache::continued", "sequences", "at least one", "none"));
        };
        for (cache, sample) in sequences {
            let fits = *sample < cache.samples() && of(cache) == layers;
            if !fits {
                let expected = format!("samples below {} of caches of one shape", cache.samples());
                return Err(Error::shape("KvCache::continued", "sequences", expected, sample));
            }
        }
        let lengths: Vec<usize> = sequences.iter().map(|(cache, sample)| cache.position(*sample)).collect();
        let mut all = Self::new(&layers, &lengths, 1, capacity);
        for (index, layer) in all.layers.iter_mut().enumerate() {
            let mut blocks: Vec<_> = sequences.iter().zip(layer.next_prompts(sequences.len())).collect();
            blocks.par_chunks_mut(1).for_each(|blocks| {
                for ((cache, sample), block) in blocks {
                    cache.copy_sequence(index, *sample, block);
                }
            });
        }
        Ok(all)
    }

    /// Copies the positions of a sample and of its prompt to the block `to` of another cache: all that the sample's next position attends to.
    fn copy_sequence(&self, layer: usize, sample: usize, to: &mut [f32]) {
        let (layer, prompt) = (&self.layers[layer], sample / self.per_prompt);
        let heads = layer.heads;
        let (length, size) = (self.position(sample), layer.slots * layer.position());
        let own = &layer.samples[sample * size..(sample + 1) * size];
        let kept = layer.kept(length);
        let parts = layer.parts(self.prompts[prompt], layer.prompt(prompt), own, length - kept..length);
        let mut row = vec![0.0; heads.row()];
        let positions = parts.iter().flat_map(|part| part.visible.clone().map(move |i| (part, i)));
        for (i, (Part { block, len, .. }, from)) in positions.enumerate() {
            read(block, heads, *len, from, &mut row);
            write(to, heads, kept, i, &row);
        }
    }

    /// Returns the bytes of keys and values.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let of = |layer: &Layer| layer.prompts.len() + layer.samples.len();
        self.layers.iter().map(of).sum::<usize>() * size_of::<f32>()
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> usize {
        self.filled.len()
    }

    /// Returns the position of the next token of `sample`, an index below [`KvCache::samples`].
    pub fn position(&self, sample: usize) -> usize {
        self.prompts[sample / self.per_prompt] + self.filled[sample]
    }

    /// Returns the free positions of `sample`; see [`KvCache::position`].
    pub fn free(&self, sample: usize) -> usize {
        self.capacity - self.filled[sample]
    }

    /// Stores keys and values of the next prompts of a layer: rows of `qkv: [N, (A + 2K) D]`, one span per prompt.
    ///
    /// # Errors
    /// [`Error::Shape`] if the spans do not match the prompts that the layer has not stored yet.
    pub fn fill_prompts(&mut self, layer: usize, qkv: &[f32], spans: &[Span]) -> Result<()> {
        let open = &self.prompts[self.layers[layer].stored..];
        let lengths: Vec<usize> = spans.iter().map(|span| span.rows.len()).collect();
        if !open.starts_with(&lengths) {
            return Err(Error::shape("fill_prompts", "spans", format!("the first of {open:?}"), format!("{spans:?}")));
        }
        let layer = &mut self.layers[layer];
        let heads = layer.heads;
        fits("fill_prompts", "qkv", qkv.len(), &[lengths.iter().sum(), heads.row()])?;
        let position = layer.position().max(1);
        let mut blocks: Vec<_> = layer.next_prompts(spans.len()).into_iter().zip(spans).collect();
        blocks.par_chunks_mut(1).for_each(|blocks| {
            for (block, span) in blocks {
                let len = block.len() / position;
                for (i, row) in (span.rows.end - len..span.rows.end).enumerate() {
                    write(block, heads, len, i, &qkv[row * heads.row()..(row + 1) * heads.row()]);
                }
            }
        });
        Ok(())
    }

    /// Advances each of `samples` by the position that all layers have written.
    pub fn advance(&mut self, samples: &[usize]) {
        samples.iter().for_each(|sample| self.filled[*sample] += 1);
    }
}

/// Returns the index of the first element of key `i` among the keys of a head in a block of `len` positions, and the distance from each element
/// to the next.
fn key_place(d: usize, len: usize, i: usize) -> (usize, usize) {
    let panel = i / VECTOR * VECTOR;
    (panel * d + i - panel, VECTOR.min(len - panel))
}

/// Writes position `i` of a block of `len` positions.
fn write(block: &mut [f32], heads: Heads, len: usize, i: usize, row: &[f32]) {
    let d = heads.width;
    let (keys, values) = block.split_at_mut(heads.key_value * len * d);
    let (first, step) = key_place(d, len, i);
    for k in 0..heads.key_value {
        let places = keys[k * len * d + first..].iter_mut().step_by(step);
        places.zip(&row[heads.keys(k)]).for_each(|(to, key)| *to = *key);
        values[(k * len + i) * d..(k * len + i + 1) * d].copy_from_slice(&row[heads.values(k)]);
    }
}

/// Reads position `i` of a block of `len` positions.
fn read(block: &[f32], heads: Heads, len: usize, i: usize, row: &mut [f32]) {
    let d = heads.width;
    let (keys, values) = block.split_at(heads.key_value * len * d);
    let (first, step) = key_place(d, len, i);
    for k in 0..heads.key_value {
        let places = keys[k * len * d + first..].iter().step_by(step);
        row[heads.keys(k)].iter_mut().zip(places).for_each(|(to, key)| *to = *key);
        row[heads.values(k)].copy_from_slice(&values[(k * len + i) * d..(k * len + i + 1) * d]);
    }
}

impl Layers {
    /// Computes attention of one new position of each of `samples`: [`KvCache::position`] + `ahead`. With `ahead` above 0, earlier calls must
    /// have written the positions before it to this layer. Queries, keys and values are the rows of
    /// `qkv: [samples, (A + 2K) D]`. Returns values `[samples, A D]`. Keys and values are written to the layer of the cache,
    /// and count as filled after [`KvCache::advance`]. `samples` must be ascending. Positions before the layer's window are not read.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows and samples do not match, a sample has no room for the position, or the window is 0.
    pub fn attention_cached(
        &self,
        qkv: &[f32],
        cache: &mut KvCache,
        layer: usize,
        samples: &[usize],
        ahead: usize,
    ) -> Result<Mixed> {
        let Layer { heads, scores, .. } = cache.layers[layer];
        fits("attention_cached", "qkv", qkv.len(), &[samples.len(), heads.row()])?;
        if !samples.is_sorted_by(|a, b| a < b) || samples.last().is_some_and(|last| *last >= cache.filled.len()) {
            let expected = format!("ascending numbers below {}", cache.filled.len());
            return Err(Error::shape("attention_cached", "samples", expected, format!("{samples:?}")));
        }
        if scores.window == Some(0) {
            return Err(Error::shape("attention_cached", "window", "at least 1", 0));
        }
        if let Some(full) = samples.iter().find(|sample| cache.free(**sample) <= ahead) {
            return Err(Error::shape("attention_cached", "positions", format!("room in sample {full}"), "none"));
        }
        let (width, scale) = (heads.query * heads.width, scores.scale(heads));
        let mut mixed = Mixed { values: vec![0.0; samples.len() * width], lse: vec![0.0; samples.len() * heads.query] };
        let layer_cache = &mut cache.layers[layer];
        let mut all = std::mem::take(&mut layer_cache.samples);
        let (layer_cache, size) = (&*layer_cache, (layer_cache.slots * layer_cache.position()).max(1));
        let own = |sample: usize| cache.filled[sample] + ahead;
        let (mut rows, mut next, mut blocks) = (Vec::new(), 0, all.chunks_exact_mut(size));
        for (sample, row) in samples.iter().zip(qkv.chunks_exact(heads.row())) {
            rows.extend(blocks.nth(sample - next).map(|block| (*sample, row, block)));
            next = sample + 1;
        }
        rows.par_chunks_mut(4).for_each(|rows| {
            for (sample, row, block) in rows {
                write(block, heads, layer_cache.slots, own(*sample) % layer_cache.slots, row);
            }
        });
        // A group: the query heads of one sample that share a key head.
        let (per_key, d) = (heads.per_key_head(), heads.width);
        let longest = samples.iter().map(|sample| cache.prompts[sample / cache.per_prompt] + own(*sample) + 1).max();
        let groups = GROUP_PRODUCTS.div_ceil((2 * per_key * d * longest.unwrap_or(1)).max(1));
        let outs = mixed.values.par_chunks_mut((groups * per_key * d).max(1));
        let blocks = &all[..];
        outs.zip(mixed.lse.par_chunks_mut((groups * per_key).max(1))).enumerate().for_each(|(task, (outs, lses))| {
            let mut buffer = Vec::new();
            let outs = outs.chunks_exact_mut(per_key * d).zip(lses.chunks_exact_mut(per_key));
            for (group, (out, lse)) in (task * groups..).zip(outs) {
                let (i, k) = (group / heads.key_value, group % heads.key_value);
                let sample = samples[i];
                let (prompt, block) = (sample / cache.per_prompt, &blocks[sample * size..(sample + 1) * size]);
                let (length, end) = (cache.prompts[prompt], cache.prompts[prompt] + own(sample) + 1);
                let parts = layer_cache.parts(length, layer_cache.prompt(prompt), block, scores.first(end)..end);
                let queries = &qkv[i * heads.row()..][k * per_key * d..(k + 1) * per_key * d];
                mix(self.gemm.isa(), heads, k, queries, scale, &parts, &mut buffer, out, lse);
            }
        });
        cache.layers[layer].samples = all;
        Ok(mixed)
    }
}

/// A block of `len` positions; a query attends to the `visible` ones.
#[derive(Clone)]
struct Part<'a> {
    block: &'a [f32],
    len: usize,
    visible: Range<usize>,
}

/// The distance of the values that are prefetched, in positions. Keys are prefetched two panels ahead.
const AHEAD: usize = 16;
/// The bytes of values that are multiplied with all their columns before the next ones: they stay in the L1 cache.
const NEAR_VALUES: usize = 32 << 10;

/// Computes the means `out: [R, D]` of the parts' values of key head `k`, weighted by the probabilities of the queries `[R, D]`, and the
/// log-sum-exp `[R]` of their scores. `scores` is a buffer.
#[allow(clippy::too_many_arguments)]
fn mix(
    isa: IsaToken,
    heads: Heads,
    k: usize,
    queries: &[f32],
    scale: f32,
    parts: &[Part<'_>; 3],
    scores: &mut Vec<f32>,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let width = parts.iter().map(|part| part.visible.len()).sum();
    scores.resize(lse.len() * width, 0.0);
    let mut first = 0;
    for part in parts {
        part.score(isa, heads, k, queries, Strided { values: &mut scores[first..], stride: width });
        first += part.visible.len();
    }
    softmax_rows(isa, scores, width, scale, lse);
    let mut first = 0;
    for part in parts {
        part.add_values(isa, heads, k, Strided { values: &scores[first..], stride: width }, out, first > 0);
        first += part.visible.len();
    }
}

/// Returns the rows of a group of query heads in blocks of at most [`ROWS`].
fn blocks_of(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(ROWS).map(move |row| row..rows.min(row + ROWS))
}

impl Part<'_> {
    /// Computes the scores `[R, visible]` of the queries `[R, D]` and the keys of key head `k`, without their factor.
    fn score(&self, isa: IsaToken, heads: Heads, k: usize, queries: &[f32], scores: Strided<&mut [f32]>) {
        let (Self { block, len, visible }, d) = (self, heads.width);
        let mut at = visible.start / VECTOR * VECTOR;
        while at < visible.end {
            let is_pair = at + 2 * VECTOR <= *len && at + VECTOR < visible.end;
            let step = VECTOR.min(len - at);
            let end = if is_pair { at + 2 * VECTOR } else { at + step };
            let columns = visible.start.max(at) - at..visible.end.min(end) - at;
            let keys = Strip { values: &block[(k * len + at) * d..], step, second: VECTOR * d, ahead: 2 * VECTOR * d };
            let column = at + columns.start - visible.start;
            for rows in blocks_of(heads.per_key_head()) {
                let lhs = Strided { values: &queries[rows.start * d..], stride: d };
                let start = rows.start * scores.stride + column;
                let out = Strided { values: &mut scores.values[start..], stride: scores.stride };
                strip::multiply(isa, rows.len(), d, lhs, keys, columns.clone(), out, false);
            }
            at = end;
        }
    }

    /// Computes the sums `out: [R, D]` of the values of key head `k` times their `probabilities: [R, visible]`, or adds them to `out` if `add`.
    fn add_values(
        &self,
        isa: IsaToken,
        heads: Heads,
        k: usize,
        probabilities: Strided<&[f32]>,
        out: &mut [f32],
        add: bool,
    ) {
        let (Self { block, len, visible }, d) = (self, heads.width);
        let values = &block[(heads.key_value + k) * len * d..];
        let near = (NEAR_VALUES / size_of::<f32>() / d.max(1)).max(1);
        for start in visible.clone().step_by(near) {
            let (first, count) = (start - visible.start, near.min(visible.end - start));
            for column in (0..d).step_by(2 * VECTOR) {
                let columns = 0..(2 * VECTOR).min(d - column);
                let values = Strip { values: &values[start * d + column..], step: d, second: VECTOR, ahead: AHEAD * d };
                for rows in blocks_of(heads.per_key_head()) {
                    let stride = probabilities.stride;
                    let lhs = Strided { values: &probabilities.values[rows.start * stride + first..], stride };
                    let out = Strided { values: &mut out[rows.start * d + column..], stride: d };
                    strip::multiply(isa, rows.len(), count, lhs, values, columns.clone(), out, add || first > 0);
                }
            }
        }
    }
}

simd_dispatch! {
    /// Replaces rows of `width` scores by probabilities, and writes the log-sum-exp of each.
    fn softmax_rows(scores: &mut [f32], width: usize, scale: f32, lse: &mut [f32]) = softmax_rows_body
}

#[inline(always)]
fn softmax_rows_body<M: MulAdd>(scores: &mut [f32], width: usize, scale: f32, lse: &mut [f32]) {
    for (row, lse) in scores.chunks_exact_mut(width.max(1)).zip(lse) {
        *lse = softmax_row::<M>(row, scale);
    }
}
