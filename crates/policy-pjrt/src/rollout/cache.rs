//! The KV caches of a rollout.
//!
//! Layers with the same heads and the same sliding window share a cache. Without a window, position p of a sequence is in column p. A layer with
//! a window of W tokens keeps the last positions only: position p is in column p modulo the number of columns (a ring buffer). A cache has
//!
//! ```text
//! W - 1     columns for the tokens that the next token attends to
//! + ahead   columns for the tokens that calls may write from there on
//! ```
//!
//! columns, rounded up, so that no call overwrites a token that a later one attends to. Calls also write the rows of sequences that have
//! finished, and a turn of a conversation may drop the last tokens of the turn before; `ahead` counts both.
//!
//! Legend: L layers of a cache, P prompts, B slots, S columns of a cache, C columns of it that are read, T tokens, K key/value heads, D head
//! dimension.

use super::columns::{Columns, remainder};
use super::window::{CACHE, ROWS, Window};
use crate::decoder::{Compute, Decoder, Dims, zeros};
use crate::leaves::Leaves;
use grpo_models::{AttentionHeads, LayerSpec, ModelConfig};
use grpo_stablehlo::{Dtype, Result, TensorType, Value};

/// Layers with attention that share a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedLayers {
    heads: AttentionHeads,
    pub(super) window: Option<usize>,
    /// L.
    count: usize,
}

impl CachedLayers {
    /// Returns the caches of a model, in the order of the first layer of each.
    pub(super) fn of(config: &ModelConfig) -> Vec<Self> {
        let mut caches: Vec<Self> = Vec::new();
        for layer in config.attention_layers() {
            match caches.iter_mut().find(|cache| cache.has(config, layer)) {
                Some(cache) => cache.count += 1,
                None => caches.push(Self { heads: config.heads(layer), window: layer.sliding_window, count: 1 }),
            }
        }
        caches
    }

    fn has(&self, config: &ModelConfig, layer: LayerSpec) -> bool {
        (self.heads, self.window) == (config.heads(layer), layer.sliding_window)
    }

    /// Returns the index of the cache of a layer with attention.
    pub(super) fn index(config: &ModelConfig, layer: LayerSpec) -> usize {
        Self::of(config).iter().take_while(|cache| !cache.has(config, layer)).count()
    }

    /// Returns the type of keys, and of values, in `columns` columns of `rows` sequences.
    pub(super) fn ty(&self, compute: Compute, rows: usize, columns: usize) -> TensorType {
        let AttentionHeads { key_value, width, .. } = self.heads;
        TensorType::new(compute.dtype(), [self.count, rows, key_value, columns, width])
    }
}

/// Returns the first columns of a cache `[P, K, C, D]` after prompts, given their keys or values `[P, K, T, D]`: C is S or, if less, T. Tokens
/// that `kept` `[P, T]` does not mark are not written, and empty columns are zero.
pub(super) fn columns_of_prompts(part: &Value, kept: &Value, columns: usize) -> Value {
    let f = part.builder();
    let [rows, heads, tokens, width] = part.dims();
    let mut cache: Option<Value> = None;
    // Later positions replace earlier ones.
    for first in (0..tokens).step_by(columns) {
        let end = tokens.min(first + columns);
        let of_chunk = part.slice(&[0, 0, first, 0], &[rows, heads, end, width]);
        let there = kept.slice(&[0, first], &[rows, end]).broadcast_in_dim(of_chunk.shape(), &[0, 2]);
        let [of_chunk, there] = [of_chunk, there].map(|part| match columns.min(tokens) - (end - first) {
            0 => part,
            more => part.pad(&zeros(&f, part.dtype(), &[]), &[0; 4], &[0, 0, more, 0]),
        });
        let before = cache.unwrap_or_else(|| of_chunk.like(0.0));
        cache = Some(there.select(&of_chunk, &before));
    }
    cache.unwrap_or_else(|| part.clone())
}

/// Writes the tokens of a call, a window, into `caches`, row by row from position `first` (`[B]`, i32) on, and returns them. Tokens after the end
/// of a finished sequence are written, too, and never read.
///
/// Every device writes the rows of its own slots: the partitioner would gather the window, because the loop slices the sharded dimension of
/// rows.
pub(super) fn flush(
    decoder: &Decoder,
    columns: Columns,
    caches: &Window,
    first: &Value,
    window: &Window,
) -> Result<Window> {
    let f = first.builder();
    let is_ring = |cache: &CachedLayers| columns.of(cache.window) < columns.all;
    let rings: Vec<bool> = CachedLayers::of(decoder.config()).iter().map(is_ring).collect();
    if rings.is_empty() {
        return Ok(caches.clone());
    }
    let all = (first.clone(), [caches.clone(), window.clone()]);
    let axes = std::iter::once(&ROWS[..]).chain(std::iter::repeat(&CACHE[..]));
    let operands: Vec<_> = all.leaves().into_iter().zip(axes).collect();
    let flushed = decoder.axis_rules().on_shards(&f, &operands, &vec![&CACHE[..]; 2 * rings.len()], |f, shards| {
        let (first, [caches, window]) = Leaves::from_leaves(&all, shards);
        let zero = f.scalar(0, Dtype::I32);
        f.for_loop(first.shape()[0], &caches.leaves(), |row, carried| {
            let first = first.dynamic_slice(&[row], &[1]).reshape(&[]);
            let place = |((cache, window), is_ring): ((&Value, &Value), &bool)| {
                let mut sizes = window.shape().to_vec();
                sizes[1] = 1;
                let tokens = window.dynamic_slice(&[&zero, row, &zero, &zero, &zero], &sizes);
                match is_ring {
                    true => put_in_ring(cache, &tokens, row, &first),
                    false => cache.dynamic_update_slice(&tokens, &[&zero, row, &zero, &first, &zero]),
                }
            };
            carried.iter().zip(window.leaves()).zip(rings.iter().cycle()).map(place).collect()
        })
    })?;
    Ok(Window::from_leaves(caches, &flushed))
}

/// Writes the tokens `[L, 1, K, T, D]` of a row from position `first` on into a cache `[L, B, K, S, D]` whose columns are positions modulo S,
/// at least T.
fn put_in_ring(cache: &Value, tokens: &Value, row: &Value, first: &Value) -> Value {
    let (zero, all, count) = (first.like(0), cache.shape()[3], tokens.shape()[3]);
    let column = remainder(first, all);
    // The tokens fill the columns from `start` on, except the last `over` tokens, which fill those from 0 on.
    let start = column.min(&column.like((all - count) as i64));
    let over = &column - &start;
    // The last `over` tokens, and then the others.
    let twice = tokens.builder().concatenate(&[tokens, tokens], 3);
    let shifted =
        twice.dynamic_slice(&[&zero, &zero, &zero, &(over.like(count as i64) - &over), &zero], tokens.shape());
    let index = tokens.builder().iota(3, tokens.ty().with_dtype(Dtype::I32));
    let is_over = index.lt(&over.broadcast_in_dim(index.shape(), &[]));
    let put = |cache: &Value, is_new: &Value, column: &Value| {
        let at = [&zero, row, &zero, column, &zero];
        let before = cache.dynamic_slice(&at, tokens.shape());
        cache.dynamic_update_slice(&is_new.select(&shifted, &before), &at)
    };
    put(&put(cache, &!&is_over, &start), &is_over, &zero)
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_stablehlo::Builder;

    /// Positions are in the columns that [`Columns::positions`] names, after prompts and after calls.
    #[test]
    fn a_ring_has_the_last_positions() {
        let columns = Columns { all: 64, ahead: 4 };
        let (window, size, tokens, count) = (Some(9), 16, 40, 4);
        assert_eq!((columns.of(window), columns.of(Some(100)), columns.of(None)), (size, 64, 64));
        for length in [0, 1, 15, 16, 17, 31, 33, 40] {
            let f = Builder::new();
            // The keys of a token are its position plus 1.
            let numbers = |ty: TensorType, from: i64| {
                (f.iota(2, ty.with_dtype(Dtype::I32)) + f.splat(from, ty.with_dtype(Dtype::I32))).convert(Dtype::F32)
            };
            let prompt = numbers(TensorType::new(Dtype::F32, [1, 1, tokens, 1]), 1);
            let kept = f
                .iota(1, TensorType::new(Dtype::I32, [1, tokens]))
                .lt(&f.splat(length as i64, TensorType::new(Dtype::I32, [1, tokens])));
            let ring = columns_of_prompts(&prompt, &kept, size).reshape(&[1, 1, 1, size, 1]);
            let new =
                numbers(TensorType::new(Dtype::F32, [1, 1, count, 1]), length as i64 + 1).reshape(&[1, 1, 1, count, 1]);
            let after = put_in_ring(&ring, &new, &f.scalar(0, Dtype::I32), &f.scalar(length as i64, Dtype::I32));
            let next = |by: usize| f.splat((length + by) as i64, TensorType::new(Dtype::I32, [1]));
            let held = [0, count].map(|by| columns.positions(window, &next(by), usize::MAX));
            let results = [("ring", &ring), ("after", &after), ("held", &held[0]), ("held after", &held[1])];
            let found = f.finish("ring", &results).unwrap().interpret(&[]).unwrap();
            for (keys, held, length) in [(&found[0], &found[2], length), (&found[1], &found[3], length + count)] {
                let (keys, held) = (keys.to_floats(), held.to_ints());
                let last: Vec<i64> = (length.saturating_sub(size)..length).map(|p| p as i64).collect();
                let mut filled: Vec<i64> = held.iter().copied().filter(|position| *position >= 0).collect();
                filled.sort_unstable();
                assert_eq!(filled, last, "{length}");
                for (key, position) in keys.iter().zip(&held) {
                    assert_eq!(*key, (position + 1).max(0) as f64, "{length}: {keys:?} {held:?}");
                }
            }
        }
    }
}
