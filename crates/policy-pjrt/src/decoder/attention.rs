//! Grouped-query attention (arXiv 2305.13245) over rows of whole sequences.
//!
//! Legend: B rows, T tokens of a row, H hidden size, A query heads, K key/value heads, R = A / K, D head dimension.

use super::blockwise::Blockwise;
use super::layer_loop::Layer;
use super::layer_ops::{Broadcast, Dims, dot, last_columns};
use super::{Axis, Decoder, Matrix, ParameterValues, Role, Rotary, Rows};
use crate::leaves::Leaves;
use grpo_models::{AttentionHeads, LayerSpec, Mixer};
use grpo_stablehlo::{DotDimensions, Dtype, Reducer, TensorType, Value};
use std::slice::Iter;

/// Score of masked pairs: far below any score, but finite, so that no softmax becomes NaN.
pub(crate) const MASKED: f64 = -1e30;

/// Queries, keys and values of a layer after the rotary embedding, in the dtype of matrix products.
#[derive(Clone, Debug)]
pub struct Heads {
    /// `[B, K, R, T, D]`.
    pub queries: Value,
    /// `[B, K, T, D]`.
    pub keys: Value,
    /// `[B, K, T, D]`.
    pub values: Value,
}

/// Queries, keys and values of a layer with tokens in the last dimension. The two halves of a head that the rotary embedding combines are
/// then in different registers, and attention reads blocks of tokens without a copy.
#[derive(Clone, Debug)]
pub(super) struct Projected {
    /// `[B, A D, T]`, or by head `[B, K, R, D, T]`.
    queries: Value,
    /// `[B, K D, T]`, or by head `[B, K, D, T]`.
    keys: Value,
    /// Like `keys`.
    values: Value,
    heads: AttentionHeads,
}

impl Projected {
    /// Returns the same with a dimension of heads.
    fn by_head(self) -> Self {
        let AttentionHeads { query, key_value: kv, width } = self.heads;
        let [b, t] = [0, self.keys.shape().len() - 1].map(|d| self.keys.shape()[d]);
        let [keys, values] = [&self.keys, &self.values].map(|part| part.reshape(&[b, kv, width, t]));
        Self { queries: self.queries.reshape(&[b, kv, query / kv, width, t]), keys, values, ..self }
    }

    /// Applies the rotary embedding; queries and keys are then of dtype `result`.
    pub(super) fn rotated(self, rotary: &Rotary, result: Dtype) -> Self {
        let heads = self.by_head();
        let (queries, keys) = (rotary.rotated_queries(&heads.queries, result), rotary.rotated(&heads.keys, result));
        Self { queries, keys, ..heads }
    }
}

/// Causal mask of rows. A token attends to itself and to earlier tokens of its row. If sequences share a row, it attends to the `position`
/// tokens before it, which are the earlier tokens of its sequence. With a window of W tokens, it attends to at most W - 1 tokens before it. No
/// softmax is empty, because every token attends to itself.
#[derive(Clone, Debug)]
pub struct Mask(MaskKind);

#[derive(Clone, Debug)]
enum MaskKind {
    /// Predicates `[T, T]` or `[B, T, T]`, with the query dimension before the key dimension.
    Pairs(Value),
    /// The mask is computed within each block; from the positions `[B, T]` if sequences share rows.
    Blocks { block: usize, window: Option<usize>, positions: Option<Value> },
}

/// A value for each window of the layers of a model: a mask, for example.
#[derive(Clone, Debug)]
pub(crate) struct ByWindow<T>(Vec<(Option<usize>, T)>);

impl<T> ByWindow<T> {
    /// Creates the values with `new` for each of [`Decoder::windows`].
    pub(crate) fn new(decoder: &Decoder, mut new: impl FnMut(Option<usize>) -> T) -> Self {
        Self(decoder.windows().into_iter().map(|window| (window, new(window))).collect())
    }

    /// Returns the value of layers with this window.
    ///
    /// # Panics
    /// Panics if no layer has it.
    pub(crate) fn of(&self, window: Option<usize>) -> &T {
        let found = self.0.iter().find(|(other, _)| *other == window);
        found.map(|(_, value)| value).unwrap_or_else(|| panic!("no layer has the window {window:?}"))
    }
}

impl<T: Leaves> Leaves for ByWindow<T> {
    fn leaves(&self) -> Vec<&Value> {
        self.0.iter().flat_map(|(_, value)| value.leaves()).collect()
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        Self(self.0.iter().map(|(window, value)| (*window, value.take(values))).collect())
    }
}

impl Leaves for Mask {
    fn leaves(&self) -> Vec<&Value> {
        match &self.0 {
            MaskKind::Pairs(pairs) => pairs.leaves(),
            MaskKind::Blocks { positions, .. } => positions.leaves(),
        }
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        Self(match &self.0 {
            MaskKind::Pairs(pairs) => MaskKind::Pairs(pairs.take(values)),
            MaskKind::Blocks { block, window, positions } => {
                MaskKind::Blocks { block: *block, window: *window, positions: positions.take(values) }
            }
        })
    }
}

impl Mask {
    fn pairs(rows: &Rows, window: Option<usize>) -> Value {
        let (b, t) = (rows.ids.shape()[0], rows.ids.shape()[1]);
        let builder = rows.ids.builder();
        let square = TensorType::new(Dtype::I32, [t, t]);
        let behind = builder.iota(0, square.clone()) - builder.iota(1, square);
        if !rows.shared {
            return match window {
                None => behind.ge(&behind.like(0)),
                Some(window) => within(&behind, &behind.like(last(window))),
            };
        }
        let positions = bounded(&rows.positions, window);
        within(&behind.broadcast_in_dim(&[b, t, t], &[1, 2]), &positions.broadcast_in_dim(&[b, t, t], &[0, 1]))
    }
}

impl Decoder {
    /// Returns the causal mask of `rows`, which also separates the sequences of a shared row, for layers with this window.
    pub fn mask(&self, rows: &Rows, window: Option<usize>) -> Mask {
        Mask(match self.attention.block(rows.ids.shape()[1]) {
            Some(block) => MaskKind::Blocks { block, window, positions: rows.shared.then(|| rows.positions.clone()) },
            None => MaskKind::Pairs(Mask::pairs(rows, window)),
        })
    }

    /// Returns the masks of all layers.
    pub(crate) fn masks(&self, rows: &Rows) -> ByWindow<Mask> {
        ByWindow::new(self, |window| self.mask(rows, window))
    }

    /// Returns the different windows of layers with attention.
    fn windows(&self) -> Vec<Option<usize>> {
        let mut windows = Vec::new();
        for layer in self.config.period().into_iter().filter(|layer| layer.mixer == Mixer::Attention) {
            if !windows.contains(&layer.sliding_window) {
                windows.push(layer.sliding_window);
            }
        }
        windows
    }

    /// Returns queries, keys and values, f32, of `x` `[B, T, H]`, and the gates of the outputs before the sigmoid, `[B, T, A D]`, f32, if the
    /// model has them.
    pub(super) fn projected(&self, layer: &Layer<'_>, x: &Value) -> (Projected, Option<Value>) {
        let heads = self.config.heads(layer.spec);
        let [queries, keys, values] = self.queries_keys_values(layer.spec, layer.parameters, x);
        let (queries, gates) = self.queries_and_gates(queries, heads.width);
        (Projected { queries, keys, values, heads }, gates)
    }

    /// Normalises the values, if the model does.
    pub(super) fn with_values(&self, heads: Projected) -> Projected {
        if !self.config.value_norm {
            return heads;
        }
        let values = self.unweighted_norm(&heads.clone().by_head().values, 2);
        Projected { values, ..heads }
    }

    /// Normalises queries and keys, each head alone or all together.
    pub(super) fn with_norms(&self, layer: &ParameterValues, heads: Projected) -> Projected {
        let heads = if self.config.qk_norm_over_heads { heads } else { heads.by_head() };
        let normed = |x: &Value, norm| self.norm_over(x, &layer[norm], x.shape().len() - 2);
        let (queries, keys) = (normed(&heads.queries, Role::QNorm), normed(&heads.keys, Role::KNorm));
        Projected { queries, keys, ..heads }
    }

    /// Returns the heads in the dtype of matrix products.
    pub(super) fn heads(&self, heads: Projected) -> Heads {
        let Projected { queries, keys, values, .. } = heads.by_head();
        let [queries, keys, values] = [queries, keys, values].map(|part| part.convert(self.compute.dtype()));
        let [batch, kv_heads, heads_of_each, dim] = [Axis::Batch, Axis::Kv, Axis::Heads, Axis::HeadDim].map(Some);
        let (key_axes, query_axes) = ([batch, kv_heads, None, dim], [batch, kv_heads, heads_of_each, None, dim]);
        let [keys, values] = [keys, values].map(|part| self.rules.constrain(&part.transpose(&[0, 1, 3, 2]), &key_axes));
        let queries = self.rules.constrain(&queries.transpose(&[0, 1, 2, 4, 3]), &query_axes);
        Heads { queries, keys, values }
    }

    /// Separates the queries `[B, A D, T]` and the gates `[B, T, A D]` of a projection whose heads, of width `d`, have a query and then its gate.
    fn queries_and_gates(&self, both: Value, d: usize) -> (Value, Option<Value>) {
        if !self.config.attention_output_gate {
            return (both, None);
        }
        let [b, t] = [0, 2].map(|d| both.shape()[d]);
        let heads = self.config.num_attention_heads;
        let both = both.reshape(&[b, heads, 2, d, t]);
        let [queries, gates] = [0, 1].map(|which| {
            let half = both.slice(&[0, 0, which, 0, 0], &[b, heads, which + 1, d, t]);
            half.reshape(&[b, heads * d, t])
        });
        let gates = gates.transpose(&[0, 2, 1]);
        let gates = self.rules.constrain(&gates, &[Some(Axis::Batch), None, Some(Axis::Heads)]);
        (queries, Some(gates))
    }

    /// Returns queries `[B, A D, T]`, or queries and gates `[B, 2 A D, T]`, keys and values `[B, K D, T]` of `x` `[B, T, H]`, f32.
    fn queries_keys_values(&self, spec: LayerSpec, layer: &ParameterValues, x: &Value) -> [Value; 3] {
        let of = [(Matrix::QProj, Role::QBias), (Matrix::KProj, Role::KBias), (Matrix::VProj, Role::VBias)];
        let (b, t) = (x.shape()[0], x.shape()[1]);
        if layer.get(Role::QkvProj).is_some() {
            return self.fused_queries_keys_values(self.config.heads(spec), layer, x);
        }
        // Without a value projection, values are keys.
        let of = if spec.keys_are_values { &of[..2] } else { &of[..] };
        let three = |parts: Vec<Value>| std::array::from_fn(|i| parts[i.min(parts.len() - 1)].clone());
        // Only in a decode step, weights may be transposed. Concatenating them would cost more than the product.
        if t == 1 {
            let part = |(matrix, bias): &(Matrix, Role)| {
                let part = self.linear(layer, x, *matrix, layer.get(*bias));
                part.reshape(&[b, part.shape()[2], 1])
            };
            return three(of.iter().map(part).collect());
        }
        // One product instead of three: less to compile, here and in the derivative, which has one sum of three products instead of three
        // sums. With many tokens, the cost of concatenating the weights is small.
        let weights: Vec<&Value> = of.iter().map(|(matrix, _)| &layer[matrix.role()]).collect();
        let parts = match [Axis::Heads, Axis::Kv].map(|axis| self.rules.parts(axis)) {
            [1, 1] => self.product_of_matrices(x, &weights),
            [queries, keys] if queries == keys => self.product_of_heads(self.config.heads(spec), x, &weights),
            // The queries of a key/value head are on several devices.
            _ => {
                let mut parts = self.product_of_matrices(x, &weights[..1]);
                parts.extend(self.product_of_heads(self.config.heads(spec), x, &weights[1..]));
                parts
            }
        };
        let complete = |((matrix, bias), part): (&(Matrix, Role), Value)| {
            let (matrix, bias, part) = (*matrix, *bias, part.convert(Dtype::F32));
            let part = match layer.get(bias) {
                Some(bias) => &part + bias.convert(Dtype::F32).broadcast_in_dim(part.shape(), &[1]),
                None => part,
            };
            match self.low(layer, x, matrix) {
                Some(low) => {
                    part + self.columns(
                        &low,
                        &layer[Role::LoraB(matrix)],
                        layer.summed(Role::LoraB(matrix)),
                        Dtype::F32,
                    )
                }
                None => part,
            }
        };
        three(of.iter().zip(parts).map(complete).collect())
    }

    /// Returns the products of `x` `[B, T, H]` with matrices `[O, H]`: `[B, O, T]` for each.
    fn product_of_matrices(&self, x: &Value, weights: &[&Value]) -> Vec<Value> {
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let all = x.builder().concatenate(weights, 0);
        let all = self.columns(x, &all, 1, self.compute.dtype());
        // The barrier keeps the result in the compute dtype, which halves the time of the slices and copies.
        let all = x.builder().optimization_barrier(&[&all]).swap_remove(0);
        let mut from = 0;
        let part = |weight: &&Value| {
            let (mut start, mut limit) = ([0; 3], [b, 0, t]);
            (start[1], limit[1]) = (from, from + weight.shape()[0]);
            from = limit[1];
            all.slice(&start, &limit)
        };
        weights.iter().map(part).collect()
    }

    /// Returns the same as [`Decoder::product_of_matrices`] for heads on several devices. The query heads of each key/value head, with their
    /// gates, are concatenated with that head, `[K, R + 2, D, H]`, or `[K, R + 1, D, H]` if values are keys: if whole matrices were
    /// concatenated, shards would move between devices.
    fn product_of_heads(&self, heads: AttentionHeads, x: &Value, weights: &[&Value]) -> Vec<Value> {
        let (b, t, h) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let AttentionHeads { key_value: kv, width: d, .. } = heads;
        let of_each: Vec<usize> = weights.iter().map(|weight| weight.shape()[0] / (kv * d)).collect();
        let grouped: Vec<Value> =
            weights.iter().zip(&of_each).map(|(weight, of_each)| weight.reshape(&[kv, *of_each, d, h])).collect();
        let all = x.builder().concatenate(&grouped.iter().collect::<Vec<_>>(), 1).convert(self.compute.dtype());
        let x = x.convert(self.compute.dtype());
        let all = all.dot_general(&x, DotDimensions::contract(3, 2), self.compute.dtype(), self.compute.precision());
        // [B, K, R + 2, D, T]
        let all = x.builder().optimization_barrier(&[&all.transpose(&[3, 0, 1, 2, 4])]).swap_remove(0);
        let mut from = 0;
        let part = |heads: usize| {
            let part = all.slice(&[0, 0, from, 0, 0], &[b, kv, from + heads, d, t]);
            from += heads;
            part.reshape(&[b, kv * heads * d, t])
        };
        of_each.into_iter().map(part).collect()
    }

    /// Returns the same as [`Decoder::queries_keys_values`] for a matrix of all three.
    fn fused_queries_keys_values(&self, heads: AttentionHeads, layer: &ParameterValues, x: &Value) -> [Value; 3] {
        let all = self.linear(layer, x, Matrix::QkvProj, None);
        let (queries, keys) = (heads.query_columns(), heads.key_columns());
        let columns = [0..queries, queries..queries + keys, queries + keys..queries + 2 * keys];
        columns.map(|columns| last_columns(&all, columns).transpose(&[0, 2, 1]))
    }

    /// Returns `weight x^T` `[B, O, T]`, summed in f32, of dtype `result`: [`Decoder::product`] with tokens in the last dimension. `x`
    /// `[B, T, I]`, `weight` `[O, I]`, or any weight with I in dimension `summed`.
    fn columns(&self, x: &Value, weight: &Value, summed: usize, result: Dtype) -> Value {
        let (x, weight) = (x.convert(self.compute.dtype()), weight.convert(self.compute.dtype()));
        let product = weight.dot_general(&x, DotDimensions::contract(summed, 2), result, self.compute.precision());
        product.transpose(&[1, 0, 2])
    }

    /// Returns the scale of attention scores of heads of this width D, D^-1/2 unless the model has another.
    pub(crate) fn score_scale(&self, width: usize) -> f64 {
        self.config.attention_multiplier.unwrap_or_else(|| (width as f64).powf(-0.5))
    }

    /// Computes attention `[B, T, A D]` in f32 among the tokens of each row. `sinks` `[A]` are the logits of sinks.
    pub fn attend(&self, heads: &Heads, mask: &Mask, sinks: Option<&Value>) -> Value {
        let (kv, width) = (heads.queries.shape()[1], heads.queries.shape()[4]);
        let sinks = sinks.map(|sinks| of_groups(sinks, kv));
        match &mask.0 {
            MaskKind::Pairs(pairs) => self.attend_pairs(heads, pairs, sinks.as_ref()),
            MaskKind::Blocks { block, window, positions } => {
                let blockwise =
                    Blockwise::new(heads, *block, *window, self.score_scale(width), self.compute, &self.rules);
                blockwise.attend(heads, positions.as_ref(), sinks.as_ref())
            }
        }
    }

    /// Computes attention with materialised scores `[B, K, R, T, T]`; `sinks` are `[K, R]`.
    fn attend_pairs(&self, heads: &Heads, mask: &Value, sinks: Option<&Value>) -> Value {
        let Heads { queries, keys, values } = heads;
        let [b, kv, r, t, d] = queries.dims();
        // [B, K, R, T, T]
        let scores = dot(queries, keys, (&[0, 1], &[0, 1]), (4, 3), self.compute);
        let pairs = [Some(Axis::Batch), Some(Axis::Kv), Some(Axis::Heads), None, None];
        let scores = self.rules.constrain(&scores, &pairs);
        let scores = &scores * scores.like(self.score_scale(d));
        let mask = match mask.shape().len() {
            2 => mask.broadcast_in_dim(scores.shape(), &[3, 4]),
            _ => mask.broadcast_in_dim(scores.shape(), &[0, 3, 4]),
        };
        let scores = mask.select(&scores, &scores.like(MASKED));
        let sinks = sinks.map(|sinks| sinks.broadcast_in_dim(&scores.shape()[..4], &[1, 2]));
        let weights = softmax(&scores, sinks.as_ref()).convert(self.compute.dtype());
        // [B, K, R, T, D]
        let mixed = dot(&weights, values, (&[0, 1], &[0, 1]), (4, 2), self.compute);
        mixed.transpose(&[0, 3, 1, 2, 4]).reshape(&[b, t, kv * r * d])
    }
}

/// Returns `true` where a key, `behind` (i32) tokens before a query, belongs to the query's sequence, given the query's position. A
/// negative `behind` (a later key) is larger than any position as u32, so one comparison checks both bounds.
pub(super) fn within(behind: &Value, positions: &Value) -> Value {
    behind.bitcast_convert(Dtype::U32).le(&positions.bitcast_convert(Dtype::U32))
}

/// Returns the positions, bounded by the number of tokens before a token in its window.
pub(super) fn bounded(positions: &Value, window: Option<usize>) -> Value {
    window.map_or(positions.clone(), |window| positions.min(&positions.like(last(window))))
}

/// Returns the number of tokens before a token in its window.
pub(super) fn last(window: usize) -> i64 {
    window.saturating_sub(1) as i64
}

/// Returns sinks `[A]` as `[K, R]`, f32, for K key/value heads.
pub(crate) fn of_groups(sinks: &Value, kv: usize) -> Value {
    sinks.convert(Dtype::F32).reshape(&[kv, sinks.shape()[0] / kv])
}

/// Computes softmax over the last dimension. `sinks` have no weight and one more term of each sum.
fn softmax(scores: &Value, sinks: Option<&Value>) -> Value {
    let last = scores.shape().len() - 1;
    let max = scores.reduce(Reducer::Max, &[last]);
    let max = sinks.map_or(max.clone(), |sinks| max.max(sinks));
    let weights = (scores - max.along_first(scores)).exp();
    let sums = weights.reduce(Reducer::Add, &[last]);
    let sums = sinks.map_or(sums.clone(), |sinks| sums + (sinks - max).exp());
    &weights / sums.along_first(&weights)
}
