//! Grouped-query attention (arXiv 2305.13245) over rows of whole sequences.
//!
//! Legend: B rows, T tokens of a row, H hidden size, A query heads, K key/value heads, R = A / K, D head dimension.

use super::block::last_columns;
use super::blockwise::Blockwise;
use super::layer_ops::{Broadcast, dot};
use super::{Axis, Decoder, Matrix, ParameterValues, Role, Rotary, Rows};
use models::{AttentionHeads, LayerSpec, Mixer};
use stablehlo::{DotDimensions, Dtype, Reducer, TensorType, Unary, Value};
use std::num::NonZeroUsize;

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
    /// The gates of the outputs before the sigmoid, `[B, T, A D]`, f32, if the model has them.
    pub gates: Option<Value>,
}

/// How attention among the tokens of a row is computed. All variants use f32 for sums and statistics, and agree up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// `Blockwise` with [`Attention::BLOCK`] for rows longer than one block, otherwise `Materialised`.
    #[default]
    Auto,
    /// Materialises the scores of all pairs of tokens for all heads: memory grows with the square of the length.
    Materialised,
    /// Computes blocks with running maxima and sums, as FlashAttention does: memory grows with the length, and blocks above the diagonal
    /// are skipped. The backward pass recomputes the scores.
    Blockwise {
        /// The largest number of tokens of a block.
        block: NonZeroUsize,
    },
}

impl Attention {
    /// Block size of [`Attention::Auto`]. The TPU compiler estimates, for a layer of Qwen2.5-0.5B with 8 rows of 1024 tokens, for attention
    /// and its derivative: 2.0 ms with blocks of 512, 2.2 ms with 256, 2.9 ms with 128, and 2.9 ms materialised.
    pub const BLOCK: NonZeroUsize = NonZeroUsize::new(512).expect("above 0");

    /// Returns the block size for rows of `length` tokens, or `None` if the scores are materialised.
    pub fn block(self, length: usize) -> Option<usize> {
        match self {
            Self::Auto => Some(Self::BLOCK.get()).filter(|block| length > *block),
            Self::Materialised => None,
            Self::Blockwise { block } => Some(block.get()),
        }
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

/// The masks of all layers of a model, by the sizes of their windows.
#[derive(Clone, Debug)]
pub struct Masks(Vec<(Option<usize>, Mask)>);

impl Masks {
    /// Returns the mask of layers with this window.
    ///
    /// # Panics
    /// Panics if no layer has it.
    pub fn of(&self, window: Option<usize>) -> &Mask {
        let found = self.0.iter().find(|(of, _)| *of == window);
        found.map(|(_, mask)| mask).unwrap_or_else(|| panic!("no layer has the window {window:?}"))
    }

    /// Returns all values, which are constants of a loop over layers.
    pub(crate) fn values(&self) -> Vec<&Value> {
        self.0.iter().flat_map(|(_, mask)| mask.values()).collect()
    }

    /// Takes the same values in another function from the front of `values`.
    pub(crate) fn take(&self, values: &mut &[Value]) -> Self {
        let same = |(window, mask): &(Option<usize>, Mask)| {
            let (own, rest) = values.split_at(mask.values().len());
            *values = rest;
            (*window, mask.with(own))
        };
        Self(self.0.iter().map(same).collect())
    }
}

impl Mask {
    /// Returns the values of the mask.
    fn values(&self) -> Vec<&Value> {
        match &self.0 {
            MaskKind::Pairs(pairs) => vec![pairs],
            MaskKind::Blocks { positions, .. } => positions.iter().collect(),
        }
    }

    /// Returns the same mask with its values in another function.
    fn with(&self, values: &[Value]) -> Self {
        Self(match (&self.0, values) {
            (MaskKind::Pairs(_), [pairs]) => MaskKind::Pairs(pairs.clone()),
            (MaskKind::Blocks { block, window, .. }, _) => {
                MaskKind::Blocks { block: *block, window: *window, positions: values.first().cloned() }
            }
            (MaskKind::Pairs(_), _) => unreachable!("one value, as `values` returned"),
        })
    }

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
    pub fn masks(&self, rows: &Rows) -> Masks {
        let mask = |window| (window, self.mask(rows, window));
        Masks(self.windows().into_iter().map(mask).collect())
    }

    /// Returns the different windows of layers with attention.
    pub(crate) fn windows(&self) -> Vec<Option<usize>> {
        let mut windows = Vec::new();
        for layer in self.config.period().into_iter().filter(|layer| layer.mixer == Mixer::Attention) {
            if !windows.contains(&layer.sliding_window) {
                windows.push(layer.sliding_window);
            }
        }
        windows
    }

    /// Computes attention `[B, T, H]`, f32, for the normalised input `x` `[B, T, H]` of a layer with this specification: `attend` computes the
    /// outputs of the heads `[B, T, A D]`, f32, from the queries, keys and values of these tokens.
    pub fn attention(
        &self,
        spec: LayerSpec,
        layer: &ParameterValues,
        x: &Value,
        rotary: Option<&Rotary>,
        attend: impl FnOnce(&Heads) -> Value,
    ) -> Value {
        let heads = self.heads(spec, layer, x, rotary);
        let mixed = attend(&heads);
        let mixed = heads.gates.map_or(mixed.clone(), |gates| mixed * gates.unary(Unary::Logistic));
        let mixed = self.split.constrain(&mixed, &[Some(Axis::Batch), None, Some(Axis::Heads)]);
        self.linear(layer, &mixed, Matrix::OProj, layer.get(Role::OBias))
    }

    /// Returns queries, keys and values of `x` `[B, T, H]`, with QK norm if the model has it, after the rotary embedding, if any.
    ///
    /// They are computed with tokens in the last dimension, `[..., D, T]`. The two halves of a head that the rotary embedding combines are
    /// then in different registers, and attention reads blocks of tokens without a copy.
    pub(crate) fn heads(&self, spec: LayerSpec, layer: &ParameterValues, x: &Value, rotary: Option<&Rotary>) -> Heads {
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let AttentionHeads { query: heads, key_value: kv, width: d } = self.config.heads(spec);
        let over_heads = self.config.qk_norm_over_heads;
        let normed = |x: Value, norm, whole: bool| match layer.get(norm).filter(|_| whole == over_heads) {
            Some(weight) => self.norm_over(&x, weight, x.shape().len() - 2),
            None => x,
        };
        let [queries, keys, values] = self.queries_keys_values(spec, layer, x);
        let (queries, gates) = self.queries_and_gates(queries, d);
        // Of dimensions [B, A D, T], then of [B, K, R, D, T].
        let (queries, keys) = (normed(queries, Role::QNorm, true), normed(keys, Role::KNorm, true));
        let queries = normed(queries.reshape(&[b, kv, heads / kv, d, t]), Role::QNorm, false);
        let queries = rotary.map_or_else(
            || queries.convert(self.compute.dtype()),
            |rotary| rotary.turn_queries(&queries, self.compute.dtype()),
        );
        let [keys, values] = [keys, values].map(|part| part.reshape(&[b, kv, d, t]));
        let keys = normed(keys, Role::KNorm, false);
        let narrow = |part: &Value| part.convert(self.compute.dtype());
        let keys = rotary.map_or_else(|| narrow(&keys), |rotary| rotary.turn(&keys, self.compute.dtype()));
        let values = if self.config.value_norm { self.unweighted_norm(&values, 2) } else { values };
        let values = narrow(&values);
        let [batch, kv_heads, heads_of_each, dim] = [Axis::Batch, Axis::Kv, Axis::Heads, Axis::HeadDim].map(Some);
        let (of_keys, of_queries) = ([batch, kv_heads, None, dim], [batch, kv_heads, heads_of_each, None, dim]);
        let [keys, values] = [keys, values].map(|part| self.split.constrain(&part.transpose(&[0, 1, 3, 2]), &of_keys));
        let queries = self.split.constrain(&queries.transpose(&[0, 1, 2, 4, 3]), &of_queries);
        Heads { queries, keys, values, gates }
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
        let gates = self.split.constrain(&gates, &[Some(Axis::Batch), None, Some(Axis::Heads)]);
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
        let parts = match self.split.parts(Axis::Kv) {
            1 => self.product_of_matrices(x, &weights),
            _ => self.product_of_heads(self.config.heads(spec), x, &weights),
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
                    Blockwise::new(heads, *block, *window, self.score_scale(width), self.compute, &self.split);
                blockwise.attend(heads, positions.as_ref(), sinks.as_ref())
            }
        }
    }

    /// Computes attention with materialised scores `[B, K, R, T, T]`; `sinks` are `[K, R]`.
    fn attend_pairs(&self, heads: &Heads, mask: &Value, sinks: Option<&Value>) -> Value {
        let Heads { queries, keys, values, .. } = heads;
        let [b, kv, r, t, d] = queries.shape() else { unreachable!("queries have five dimensions") };
        // [B, K, R, T, T]
        let scores = dot(queries, keys, (&[0, 1], &[0, 1]), (4, 3), self.compute);
        let pairs = [Some(Axis::Batch), Some(Axis::Kv), Some(Axis::Heads), None, None];
        let scores = self.split.constrain(&scores, &pairs);
        let scores = &scores * scores.like(self.score_scale(*d));
        let mask = match mask.shape().len() {
            2 => mask.broadcast_in_dim(scores.shape(), &[3, 4]),
            _ => mask.broadcast_in_dim(scores.shape(), &[0, 3, 4]),
        };
        let scores = mask.select(&scores, &scores.like(MASKED));
        let sinks = sinks.map(|sinks| sinks.broadcast_in_dim(&scores.shape()[..4], &[1, 2]));
        let weights = softmax(&scores, sinks.as_ref()).convert(self.compute.dtype());
        // [B, K, R, T, D]
        let mixed = dot(&weights, values, (&[0, 1], &[0, 1]), (4, 2), self.compute);
        mixed.transpose(&[0, 3, 1, 2, 4]).reshape(&[*b, *t, kv * r * d])
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
