//! The KV cache of earlier positions, and the attention of one new position per sample.
//!
//! The samples of a prompt share its keys and values, and finished samples need no work.

use super::attention::{Heads, Mixed, Scores, Span, softmax_row};
use super::{Layers, fits};
use crate::arch::{MulAdd, simd_dispatch};
use crate::threads::slices::*;
use grpo_core::error::{Error, Result};
use std::ops::Range;

/// The keys and values of prompts, and of their completions during sampling.
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

/// A layer's keys and values: per key/value head, keys `[D, positions]` and values `[positions, D]`, so that products read contiguous rows.
#[derive(Debug)]
struct Layer {
    heads: Heads,
    /// One block per prompt, `[2, K, positions x D]`.
    prompts: Vec<Vec<f32>>,
    /// One block per sample, `[2, K, capacity x D]`.
    samples: Vec<f32>,
}

impl KvCache {
    /// Creates an empty cache of layers with these heads for prompts of the given lengths, with `per_prompt` samples of
    /// each, and `capacity` positions for every sample.
    pub fn new(layers: Vec<Heads>, prompts: &[usize], per_prompt: usize, capacity: usize) -> Self {
        let samples = prompts.len() * per_prompt;
        let layer = |heads: Heads| Layer {
            heads,
            prompts: Vec::new(),
            samples: vec![0.0; samples * 2 * heads.key_value * capacity * heads.width],
        };
        let layers = layers.into_iter().map(layer).collect();
        Self { layers, prompts: prompts.to_vec(), per_prompt, capacity, filled: vec![0; samples] }
    }

    /// Creates a cache whose prompts are whole sequences of other caches of the same model, each given as its cache and the index of its
    /// sample, with one sample per prompt and `capacity` positions for every sample.
    ///
    /// # Errors
    /// [`Error::Shape`] for an index that is not below [`KvCache::samples`], or caches of other shapes.
    pub fn continued(sequences: &[(&KvCache, usize)], capacity: usize) -> Result<Self> {
        let heads = |cache: &KvCache| cache.layers.iter().map(|layer| layer.heads).collect::<Vec<_>>();
        let Some(layers) = sequences.first().map(|(cache, _)| heads(cache)) else {
            return Err(Error::shape("KvCache::continued", "sequences", "at least one", "none"));
        };
        for (cache, sample) in sequences {
            let fits = *sample < cache.samples() && heads(cache) == layers;
            if !fits {
                let expected = format!("samples below {} of caches of one shape", cache.samples());
                return Err(Error::shape("KvCache::continued", "sequences", expected, sample));
            }
        }
        let lengths: Vec<usize> = sequences.iter().map(|(cache, sample)| cache.position(*sample)).collect();
        let mut all = Self::new(layers, &lengths, 1, capacity);
        for (index, layer) in all.layers.iter_mut().enumerate() {
            layer.prompts = sequences.iter().map(|(cache, sample)| cache.sequence(index, *sample)).collect();
        }
        Ok(all)
    }

    /// Returns the block of a layer with all positions of a sample, including its prompt.
    fn sequence(&self, layer: usize, sample: usize) -> Vec<f32> {
        let (layer, prompt) = (&self.layers[layer], sample / self.per_prompt);
        let heads = layer.heads;
        let size = 2 * heads.key_value * self.capacity * heads.width;
        let own = &layer.samples[sample * size..(sample + 1) * size];
        let parts = [(&layer.prompts[prompt][..], self.prompts[prompt]), (own, self.capacity)];
        let filled = [self.prompts[prompt], self.filled[sample]];
        let (d, len) = (heads.width, filled[0] + filled[1]);
        let mut block = Vec::with_capacity(2 * heads.key_value * len * d);
        // Rows of keys are positions; rows of values are vectors of D.
        for row in 0..heads.key_value * d {
            for ((part, stride), filled) in parts.iter().zip(filled) {
                block.extend_from_slice(&part[row * stride..row * stride + filled]);
            }
        }
        for k in 0..heads.key_value {
            for ((part, stride), filled) in parts.iter().zip(filled) {
                let first = (heads.key_value + k) * stride * d;
                block.extend_from_slice(&part[first..first + filled * d]);
            }
        }
        block
    }

    /// Takes the last `count` positions of each of `samples` back, or all of its positions if it has fewer; positions of the prompt stay.
    pub fn take_back(&mut self, samples: &[usize], count: usize) {
        samples.iter().for_each(|sample| self.filled[*sample] = self.filled[*sample].saturating_sub(count));
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

    /// Stores the prompts' keys and values of a layer: rows of `qkv: [N, (A + 2K) D]`, one span per prompt.
    ///
    /// # Errors
    /// [`Error::Shape`] if the spans do not match the prompts.
    pub fn fill_prompts(&mut self, layer: usize, qkv: &[f32], spans: &[Span]) -> Result<()> {
        if spans.len() != self.prompts.len()
            || spans.iter().zip(&self.prompts).any(|(span, len)| span.rows.len() != *len)
        {
            return Err(Error::shape("fill_prompts", "spans", format!("{:?}", self.prompts), format!("{spans:?}")));
        }
        let heads = self.layers[layer].heads;
        fits("fill_prompts", "qkv", qkv.len(), &[self.prompts.iter().sum(), heads.row()])?;
        self.layers[layer].prompts = spans
            .iter()
            .map(|span| {
                let len = span.rows.len();
                let mut block = vec![0.0; 2 * heads.key_value * len * heads.width];
                for (i, row) in span.rows.clone().enumerate() {
                    write(&mut block, heads, len, i, &qkv[row * heads.row()..(row + 1) * heads.row()]);
                }
                block
            })
            .collect();
        Ok(())
    }

    /// Advances each of `samples` by the position that all layers have written.
    pub fn advance(&mut self, samples: &[usize]) {
        samples.iter().for_each(|sample| self.filled[*sample] += 1);
    }
}

/// Writes position `i` of a block of `len` positions.
fn write(block: &mut [f32], heads: Heads, len: usize, i: usize, row: &[f32]) {
    let d = heads.width;
    let (keys, values) = block.split_at_mut(heads.key_value * len * d);
    for k in 0..heads.key_value {
        for (j, key) in row[heads.keys(k)].iter().enumerate() {
            keys[(k * d + j) * len + i] = *key;
        }
        values[(k * len + i) * d..(k * len + i + 1) * d].copy_from_slice(&row[heads.values(k)]);
    }
}

impl Layers {
    /// Computes attention of one new position of each of `samples`; their queries, keys and values are the rows of
    /// `qkv: [samples, (A + 2K) D]`. Returns values `[samples, A D]`. Keys and values are written to the layer of the cache,
    /// and count as filled after [`KvCache::advance`]. `samples` must be ascending. Positions before the window of
    /// `scores` are not read.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows and samples do not match, a sample is full, or the window is 0.
    pub fn attention_cached(
        &self,
        qkv: &[f32],
        cache: &mut KvCache,
        layer: usize,
        scores: Scores,
        samples: &[usize],
    ) -> Result<Mixed> {
        let heads = cache.layers[layer].heads;
        fits("attention_cached", "qkv", qkv.len(), &[samples.len(), heads.row()])?;
        if !samples.is_sorted_by(|a, b| a < b) || samples.last().is_some_and(|last| *last >= cache.filled.len()) {
            let expected = format!("ascending numbers below {}", cache.filled.len());
            return Err(Error::shape("attention_cached", "samples", expected, format!("{samples:?}")));
        }
        if scores.window == Some(0) {
            return Err(Error::shape("attention_cached", "window", "at least 1", 0));
        }
        if let Some(full) = samples.iter().find(|sample| cache.free(**sample) == 0) {
            return Err(Error::shape("attention_cached", "positions", format!("room in sample {full}"), "none"));
        }
        let (width, scale) = (heads.query * heads.width, scores.scale(heads));
        let mut mixed = Mixed { values: vec![0.0; samples.len() * width], lse: vec![0.0; samples.len() * heads.query] };
        let outs = mixed.values.chunks_exact_mut(width).zip(mixed.lse.chunks_exact_mut(heads.query));
        let of_layer = &mut cache.layers[layer];
        let size = 2 * heads.key_value * cache.capacity * heads.width;
        let mut blocks = of_layer.samples.chunks_exact_mut(size);
        let (mut tasks, mut next) = (Vec::new(), 0);
        for ((sample, row), out) in samples.iter().zip(qkv.chunks_exact(heads.row())).zip(outs) {
            if let Some(block) = blocks.nth(sample - next) {
                tasks.push((*sample, row, block, out));
            }
            next = sample + 1;
        }
        let (prompts, filled) = (&of_layer.prompts, &cache.filled);
        tasks.par_chunks_mut(4).for_each(|tasks| {
            let mut buffer = Vec::new();
            for (sample, row, block, (out, lse)) in tasks {
                write(block, heads, cache.capacity, filled[*sample], row);
                let (prompt, own) = (*sample / cache.per_prompt, filled[*sample] + 1);
                let of_prompt = cache.prompts[prompt];
                let first = scores.first(of_prompt + own);
                let parts = [
                    Part { block: &prompts[prompt], len: of_prompt, visible: first.min(of_prompt)..of_prompt },
                    Part { block, len: cache.capacity, visible: first.saturating_sub(of_prompt)..own },
                ];
                mix(self.gemm.isa(), heads, row, scale, parts, &mut buffer, out, lse);
            }
        });
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

simd_dispatch! {
    /// Computes the mean of the parts' values `[A, D]`, weighted by the probabilities of the queries in `row`, and the log-sum-exp `[A]`
    /// of their scores.
    #[allow(clippy::too_many_arguments)]
    fn mix(
        heads: Heads, row: &[f32], scale: f32, parts: [Part<'_>; 2], scores: &mut Vec<f32>, out: &mut [f32], lse: &mut [f32],
    ) = mix_body
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn mix_body<M: MulAdd>(
    heads: Heads,
    row: &[f32],
    scale: f32,
    parts: [Part<'_>; 2],
    scores: &mut Vec<f32>,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (d, r) = (heads.width, heads.query / heads.key_value);
    scores.resize(parts[0].visible.len() + parts[1].visible.len(), 0.0);
    for (a, out) in out.chunks_exact_mut(d).enumerate() {
        let (k, query) = (a / r, &row[heads.queries(a)]);
        let (first, second) = scores.split_at_mut(parts[0].visible.len());
        for (scores, part) in [first, second].into_iter().zip(&parts) {
            scores.fill(0.0);
            for (q, keys) in query.iter().zip(part.block[k * d * part.len..].chunks_exact(part.len.max(1))) {
                for (score, key) in scores.iter_mut().zip(&keys[part.visible.start..]) {
                    *score = M::mul_add(*q, *key, *score);
                }
            }
        }
        lse[a] = softmax_row::<M>(scores, scale);
        out.fill(0.0);
        let (first, second) = scores.split_at(parts[0].visible.len());
        for (scores, part) in [first, second].into_iter().zip(&parts) {
            let values = &part.block[((heads.key_value + k) * part.len + part.visible.start) * d..];
            for (p, values) in scores.iter().zip(values.chunks_exact(d)) {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = M::mul_add(*p, *value, *out);
                }
            }
        }
    }
}
