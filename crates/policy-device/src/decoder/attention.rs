//! Grouped-query attention (arXiv 2305.13245) of rows of whole sequences.
//!
//! Legend: B rows, T tokens of a row, H residual stream, A query heads, K key/value heads, R = A / K, D width of a head.

use super::blockwise::Blockwise;
use super::ops::{Broadcast, dot};
use super::{Axis, Decoder, Matrix, ParameterValues, Role, Rotary, Rows};
use stablehlo::{DotDimensions, Dtype, Reducer, TensorType, Value};
use std::num::NonZeroUsize;

/// What masked scores are: far below any score, and finite, so that no row becomes NaN.
pub(crate) const MASKED: f64 = -1e30;

/// Queries, keys and values of a layer, turned to their positions, in the number type of operands.
#[derive(Clone, Debug)]
pub struct Heads {
    /// `[B, K, R, T, D]`.
    pub queries: Value,
    /// `[B, K, T, D]`.
    pub keys: Value,
    /// `[B, K, T, D]`.
    pub values: Value,
}

/// How attention among the tokens of a row is computed. Sums and statistics are f32 in both ways, and the numbers are the same up to
/// rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// In blocks of [`Attention::BLOCK`] for rows of more tokens; materialised where one block would hold the row.
    #[default]
    Auto,
    /// The scores of all pairs of tokens of all heads are there at once: memory grows with the square of the length.
    Materialised,
    /// Block by block, with running maxima and sums: memory grows with the length, and blocks above the diagonal are left out. The
    /// derivative computes scores again.
    Blockwise {
        /// The largest number of tokens of a block.
        block: NonZeroUsize,
    },
}

impl Attention {
    /// The tokens of a block of [`Attention::Auto`]. By the estimates of the TPU compiler for a layer of Qwen2.5-0.5B, 8 rows of 1024
    /// tokens, attention and its derivative take 2.0 ms so, 2.2 in blocks of 256, 2.9 in blocks of 128, and 2.9 materialised.
    pub const BLOCK: NonZeroUsize = NonZeroUsize::new(512).expect("above 0");

    /// The size of blocks for rows of `length` tokens, where there are blocks.
    pub(crate) fn block(self, length: usize) -> Option<usize> {
        match self {
            Self::Auto => Some(Self::BLOCK.get()).filter(|block| length > *block),
            Self::Materialised => None,
            Self::Blockwise { block } => Some(block.get()),
        }
    }
}

/// Which tokens of a row see which: themselves and earlier ones, where sequences share a row as many as their position says, which are those
/// of their own sequence. Every token sees one at least, itself, and no softmax is that of nothing.
#[derive(Clone, Debug)]
pub struct Mask(Sight);

#[derive(Clone, Debug)]
enum Sight {
    /// `[T, T]` or `[B, T, T]` predicates, query before key.
    Pairs(Value),
    /// What is seen is computed within blocks, where sequences share rows from the positions `[B, T]`.
    Blocks { block: usize, positions: Option<Value> },
}

impl Mask {
    /// The mask as values: what is constant in a loop over layers.
    pub(crate) fn values(&self) -> Vec<&Value> {
        match &self.0 {
            Sight::Pairs(pairs) => vec![pairs],
            Sight::Blocks { positions, .. } => positions.iter().collect(),
        }
    }

    /// The same mask, of the same values in another function.
    pub(crate) fn with(&self, values: &[Value]) -> Self {
        Self(match (&self.0, values) {
            (Sight::Pairs(_), [pairs]) => Sight::Pairs(pairs.clone()),
            (Sight::Blocks { block, .. }, _) => Sight::Blocks { block: *block, positions: values.first().cloned() },
            (Sight::Pairs(_), _) => unreachable!("one value, as `values` returned"),
        })
    }

    fn pairs(rows: &Rows) -> Value {
        let (b, t) = (rows.ids.shape()[0], rows.ids.shape()[1]);
        let builder = rows.ids.builder();
        let square = TensorType::new(Dtype::I32, [t, t]);
        let behind = builder.iota(0, square.clone()) - builder.iota(1, square);
        if !rows.shared {
            return behind.ge(&behind.like(0));
        }
        within(&behind.broadcast_in_dim(&[b, t, t], &[1, 2]), &rows.positions.broadcast_in_dim(&[b, t, t], &[0, 1]))
    }
}

impl Decoder {
    /// The causal mask of `rows`, which keeps their sequences apart.
    pub fn mask(&self, rows: &Rows) -> Mask {
        Mask(match self.attention.block(rows.ids.shape()[1]) {
            Some(block) => Sight::Blocks { block, positions: rows.shared.then(|| rows.positions.clone()) },
            None => Sight::Pairs(Mask::pairs(rows)),
        })
    }

    /// Queries, keys and values of `x` `[B, T, H]`, normalised where the model has norms of heads, and turned.
    ///
    /// They are made with the tokens of a column side by side, `[..., D, T]`: the two halves of a head that turn are then apart from each
    /// other, not within one register, and attention takes blocks of tokens as they lie.
    pub(crate) fn heads(&self, layer: &ParameterValues, x: &Value, rotary: &Rotary) -> Heads {
        let config = &self.config;
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let (heads, kv, d) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim());
        let turned = |x: Value, norm| {
            rotary.turn(&layer.get(norm).map_or(x.clone(), |weight| self.norm_over(&x, weight, x.shape().len() - 2)))
        };
        let [queries, keys, values] = self.queries_keys_values(layer, x);
        let queries = turned(queries.reshape(&[b, kv, heads / kv, d, t]), Role::QNorm);
        let [keys, values] = [keys, values].map(|part| part.reshape(&[b, kv, d, t]));
        let keys = turned(keys, Role::KNorm);
        let narrow = |part: Value| part.convert(self.compute.dtype());
        let of_keys = [Axis::Batch, Axis::Kv, Axis::Length, Axis::HeadDim];
        let of_queries = [Axis::Batch, Axis::Kv, Axis::Heads, Axis::Length, Axis::HeadDim];
        let [keys, values] =
            [keys, values].map(|part| self.split.constrain(&narrow(part).transpose(&[0, 1, 3, 2]), &of_keys));
        let queries = self.split.constrain(&narrow(queries).transpose(&[0, 1, 2, 4, 3]), &of_queries);
        Heads { queries, keys, values }
    }

    /// Queries `[B, A D, T]`, keys and values `[B, K D, T]` of `x` `[B, T, H]`, f32.
    fn queries_keys_values(&self, layer: &ParameterValues, x: &Value) -> [Value; 3] {
        let of = [(Matrix::QProj, Role::QBias), (Matrix::KProj, Role::KBias), (Matrix::VProj, Role::VBias)];
        let (b, t) = (x.shape()[0], x.shape()[1]);
        // A token of the decode loop, in which weights may be transposed: to copy them side by side would cost more than the product.
        if t == 1 {
            return of.map(|(matrix, bias)| {
                let part = self.linear(layer, x, matrix, layer.get(bias));
                part.reshape(&[b, part.shape()[2], 1])
            });
        }
        let summed = layer.summed(Role::QProj);
        let parts = match self.axis_rules() {
            // Side by side, weights that are split by heads would be parts that devices send each other, and the gradients of all three,
            // which devices add up, would be rounded before.
            Some(_) => of.map(|(matrix, _)| self.columns(x, &layer[matrix.role()], summed, self.compute.dtype())),
            // One product: there are a third as many to compile, here and in the derivative, and to copy the weights side by side is little
            // where many tokens are multiplied by them.
            None => {
                let weights = of.map(|(matrix, _)| layer[matrix.role()].clone());
                let all = x.builder().concatenate(&weights.each_ref(), 1 - summed);
                let all = self.columns(x, &all, summed, self.compute.dtype());
                // Narrow, it is cut and moved about in half the time.
                let all = x.builder().optimization_barrier(&[&all]).swap_remove(0);
                let mut from = 0;
                weights.map(|weight| {
                    let (mut start, mut limit) = ([0; 3], [b, 0, t]);
                    (start[1], limit[1]) = (from, from + weight.shape()[1 - summed]);
                    from = limit[1];
                    all.slice(&start, &limit)
                })
            }
        };
        std::array::from_fn(|i| {
            let ((matrix, bias), part) = (of[i], parts[i].convert(Dtype::F32));
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
        })
    }

    /// `weight x^T` `[B, O, T]`, summed in f32, of number type `result`: [`Decoder::product`] with the tokens of a column side by side. `x`
    /// `[B, T, I]`, `weight` `[O, I]`, or what has I in the dimension `summed`.
    fn columns(&self, x: &Value, weight: &Value, summed: usize, result: Dtype) -> Value {
        let (x, weight) = (x.convert(self.compute.dtype()), weight.convert(self.compute.dtype()));
        let product = weight.dot_general(&x, DotDimensions::contract(summed, 2), result, self.compute.precision());
        product.transpose(&[1, 0, 2])
    }

    /// The factor of scores.
    pub(crate) fn score_scale(&self) -> f64 {
        (self.config.head_dim() as f64).powf(-0.5)
    }

    /// Attention `[B, T, A D]` in f32 among the tokens of each row.
    pub fn attend(&self, heads: &Heads, mask: &Mask) -> Value {
        match &mask.0 {
            Sight::Pairs(pairs) => self.attend_pairs(heads, pairs),
            Sight::Blocks { block, positions } => {
                let blockwise = Blockwise::new(heads, *block, self.score_scale(), self.compute, &self.split);
                blockwise.attend(heads, positions.as_ref())
            }
        }
    }

    /// Scores `[B, K, R, T, T]` are materialised.
    fn attend_pairs(&self, heads: &Heads, mask: &Value) -> Value {
        let Heads { queries, keys, values } = heads;
        let [b, kv, r, t, d] = queries.shape() else { unreachable!("queries have five dimensions") };
        // [B, K, R, T, T]
        let scores = dot(queries, keys, (&[0, 1], &[0, 1]), (4, 3), self.compute);
        let pairs = [Axis::Batch, Axis::Kv, Axis::Heads, Axis::Length, Axis::Length];
        let scores = self.split.constrain(&scores, &pairs);
        let scores = &scores * scores.like(self.score_scale());
        let mask = match mask.shape().len() {
            2 => mask.broadcast_in_dim(scores.shape(), &[3, 4]),
            _ => mask.broadcast_in_dim(scores.shape(), &[0, 3, 4]),
        };
        let scores = mask.select(&scores, &scores.like(MASKED));
        let weights = softmax(&scores).convert(self.compute.dtype());
        // [B, K, R, T, D]
        let mixed = dot(&weights, values, (&[0, 1], &[0, 1]), (4, 2), self.compute);
        mixed.transpose(&[0, 3, 1, 2, 4]).reshape(&[*b, *t, kv * r * d])
    }
}

/// Whether keys that lie so many tokens behind queries, i32, belong to the queries' sequences, given the queries' positions. Keys ahead are a
/// negative number of tokens behind, which without a sign is more than any position: one comparison sees both ends.
pub(super) fn within(behind: &Value, positions: &Value) -> Value {
    behind.bitcast_convert(Dtype::U32).le(&positions.bitcast_convert(Dtype::U32))
}

/// Softmax over the last dimension.
fn softmax(scores: &Value) -> Value {
    let last = scores.shape().len() - 1;
    let weights = (scores - scores.reduce(Reducer::Max, &[last]).along_first(scores)).exp();
    let sums = weights.reduce(Reducer::Add, &[last]);
    &weights / sums.along_first(&weights)
}
