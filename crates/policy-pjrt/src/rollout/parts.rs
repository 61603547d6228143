//! Attention of the tokens of a call to the cache and to the window.

use crate::decoder::{Broadcast, Decoder, Dims, Heads, MASKED, dot, of_groups};
use crate::leaves::first;
use grpo_stablehlo::{Reducer, Value};

/// A source of keys and values: the cache, the window, or the columns of both.
pub(super) struct Part {
    /// `[B, K, C, D]`; transposed: `[B, K, D, C]`.
    pub(super) keys: Value,
    pub(super) transposed: bool,
    pub(super) values: Value,
    /// Mask of the columns that a token attends to: `[B, C]`, or `[B, T, C]` for each of T tokens.
    pub(super) seen: Value,
}

impl Part {
    /// Returns the bytes of keys and values.
    pub(super) fn bytes(&self) -> usize {
        [&self.keys, &self.values].into_iter().map(|value| value.ty().elements() * value.dtype().bytes()).sum()
    }

    /// Returns the columns of both parts, whose keys are not transposed.
    pub(super) fn joined(&self, other: &Self) -> Self {
        debug_assert!(!self.transposed && !other.transposed);
        let join = |a: &Value, b: &Value, dimension| a.builder().concatenate(&[a, b], dimension);
        let (keys, values) = (join(&self.keys, &other.keys, 2), join(&self.values, &other.values, 2));
        Self { keys, transposed: false, values, seen: join(&self.seen, &other.seen, 1) }
    }
}

/// Computes attention `[B, T, A D]`, f32, of T tokens per sequence to the columns of all parts, one or more. The last part contains the tokens
/// themselves. `sinks` `[A]` are the logits of sinks.
pub(super) fn attend_parts(decoder: &Decoder, heads: &Heads, parts: &[Part], sinks: Option<&Value>) -> Value {
    let compute = decoder.compute();
    let [b, kv, r, t, d] = heads.queries.dims();
    let queries = heads.queries.reshape(&[b, kv, r * t, d]);
    // [B, K, R T, C]
    let scores = parts.iter().map(|part| {
        let scores = dot(&queries, &part.keys, (&[0, 1], &[0, 1]), (3, if part.transposed { 2 } else { 3 }), compute);
        let scores = &scores * scores.like(decoder.score_scale(d));
        let seen = match part.seen.shape() {
            [_, _, columns] => {
                let by_head = [b, kv, r, t, *columns];
                part.seen.broadcast_in_dim(&by_head, &[0, 3, 4]).reshape(scores.shape())
            }
            _ => part.seen.broadcast_in_dim(scores.shape(), &[0, 3]),
        };
        seen.select(&scores, &scores.like(MASKED))
    });
    let scores: Vec<Value> = scores.collect();
    // [B, K, R T]
    let max = over_parts(scores.iter().map(|scores| scores.reduce(Reducer::Max, &[3])), Value::max);
    let sinks = sinks.map(|sinks| of_groups(sinks, kv).broadcast_in_dim(&[b, kv, r, t], &[1, 2]).reshape(max.shape()));
    let max = sinks.as_ref().map_or(max.clone(), |sinks| max.max(sinks));
    let weights: Vec<Value> = scores.iter().map(|scores| (scores - max.along_first(scores)).exp()).collect();
    let sum = over_parts(weights.iter().map(|weights| weights.reduce(Reducer::Add, &[3])), |a, b| a + b);
    let sum = sinks.map_or(sum.clone(), |sinks| sum + (sinks - &max).exp());
    // [B, K, R T, D]
    let mixed = weights.iter().zip(parts).map(|(weights, part)| {
        dot(&weights.convert(compute.dtype()), &part.values, (&[0, 1], &[0, 1]), (3, 2), compute)
    });
    let mixed = over_parts(mixed, |a, b| a + b);
    let mixed = &mixed / sum.along_first(&mixed);
    match t {
        1 => mixed.reshape(&[b, 1, kv * r * d]),
        _ => mixed.reshape(&[b, kv, r, t, d]).transpose(&[0, 3, 1, 2, 4]).reshape(&[b, t, kv * r * d]),
    }
}

/// Combines the values of all parts, one or more.
fn over_parts(values: impl Iterator<Item = Value>, join: impl Fn(&Value, &Value) -> Value) -> Value {
    let values: Vec<Value> = values.collect();
    let ([one], others) = first(&values);
    others.iter().fold(one.clone(), |all, other| join(&all, other))
}
