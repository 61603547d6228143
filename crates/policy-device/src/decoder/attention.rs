//! Grouped-query attention (arXiv 2305.13245) of rows of whole sequences.
//!
//! Legend: B rows, T tokens of a row, H residual stream, A query heads, K key/value heads, R = A / K, D width of a head.

use super::ops::{Broadcast, dot};
use super::{Decoder, ParameterValues, Role, Rotary, Rows};
use stablehlo::{Dtype, Reducer, TensorType, Value};

/// What masked scores are: far below any score, and finite, so that no row becomes NaN.
pub(crate) const MASKED: f64 = -1e30;

/// Queries, keys and values of a layer, turned to their positions, in the number type of operands.
#[derive(Clone, Debug)]
pub struct Heads {
    /// `[B, T, K, R, D]`.
    pub queries: Value,
    /// `[B, T, K, D]`.
    pub keys: Value,
    /// `[B, T, K, D]`.
    pub values: Value,
}

/// Which tokens of a row see which: `[T, T]` or `[B, T, T]` predicates, query before key.
#[derive(Clone, Debug)]
pub struct Mask(Value);

impl Mask {
    pub(crate) fn new(value: &Value) -> Self {
        Self(value.clone())
    }

    pub(crate) fn value(&self) -> &Value {
        &self.0
    }

    /// The causal mask of `rows`, which keeps their segments apart.
    pub fn of(rows: &Rows) -> Self {
        let (b, t) = (rows.ids.shape()[0], rows.ids.shape()[1]);
        let builder = rows.ids.builder();
        let square = TensorType::new(Dtype::I32, [t, t]);
        let causal = builder.iota(0, square.clone()).ge(&builder.iota(1, square));
        let Some(segments) = &rows.segments else { return Self(causal) };
        let of = |dimension| segments.broadcast_in_dim(&[b, t, t], &[0, dimension]);
        Self(causal.broadcast_in_dim(&[b, t, t], &[1, 2]) & of(1).eq(&of(2)))
    }
}

impl Decoder {
    /// Queries, keys and values of `x` `[B, T, H]`, normalised where the model has norms of heads, and turned.
    pub(crate) fn heads(&self, layer: &ParameterValues, x: &Value, rotary: &Rotary) -> Heads {
        let config = &self.config;
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let (heads, kv, d) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim());
        let project = |weight, bias| self.project(x, &layer[weight], layer.get(bias));
        let normed = |x: Value, norm| layer.get(norm).map_or(x.clone(), |weight| self.norm(&x, weight));
        let queries = project(Role::QProj, Role::QBias).reshape(&[b, t, kv, heads / kv, d]);
        let keys = project(Role::KProj, Role::KBias).reshape(&[b, t, kv, d]);
        let values = project(Role::VProj, Role::VBias).reshape(&[b, t, kv, d]);
        let dtype = self.compute.dtype();
        Heads {
            queries: rotary.turn(&normed(queries, Role::QNorm)).convert(dtype),
            keys: rotary.turn(&normed(keys, Role::KNorm)).convert(dtype),
            values: values.convert(dtype),
        }
    }

    /// The factor of scores.
    pub(crate) fn score_scale(&self) -> f64 {
        (self.config.head_dim() as f64).powf(-0.5)
    }

    /// Attention `[B, T, A D]` in f32 among the tokens of each row. Scores `[B, K, T, R, T]` are materialised.
    pub fn attend(&self, heads: &Heads, mask: &Mask) -> Value {
        let Heads { queries, keys, values } = heads;
        let [b, t, kv, r, d] = queries.shape() else { unreachable!("queries have five dimensions") };
        // [B, K, T, R, T]
        let scores = dot(queries, keys, (&[0, 2], &[0, 2]), (4, 3), self.compute);
        let scores = &scores * scores.like(self.score_scale());
        let mask = match mask.0.shape().len() {
            2 => mask.0.broadcast_in_dim(scores.shape(), &[2, 4]),
            _ => mask.0.broadcast_in_dim(scores.shape(), &[0, 2, 4]),
        };
        let scores = mask.select(&scores, &scores.like(MASKED));
        let weights = softmax(&scores).convert(self.compute.dtype());
        // [B, K, T, R, D]
        let mixed = dot(&weights, values, (&[0, 1], &[0, 2]), (4, 1), self.compute);
        mixed.transpose(&[0, 2, 1, 3, 4]).reshape(&[*b, *t, kv * r * d])
    }
}

/// Softmax over the last dimension.
fn softmax(scores: &Value) -> Value {
    let last = scores.shape().len() - 1;
    let weights = (scores - scores.reduce(Reducer::Max, &[last]).along_first(scores)).exp();
    let sums = weights.reduce(Reducer::Add, &[last]);
    &weights / sums.along_first(&weights)
}
