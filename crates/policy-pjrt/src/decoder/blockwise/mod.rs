//! Blockwise attention (arXiv 2205.14135, 2307.08691): never materialises the scores of all pairs of tokens.
//!
//! ```text
//! for each block of queries Q and each block of keys K, V not above the diagonal, nor before the window:
//!     S = scale Q K^T, masked
//!     m' = max(m, rowmax(S));  W = exp(S - m');  d = exp(m - m')
//!     sum = d sum + rowsum(W);  O = d O + W V;  m = m'
//! O = O / sum;  lse = m + log(sum)
//! ```
//!
//! A sink is an entry of the softmax without a value: m begins as its logit, and sum as 1.
//!
//! The backward pass loops over the same pairs, recomputes the scores from `lse`, and accumulates the gradients in f32.
//!
//! Legend: B rows, T tokens of a row, C tokens of a block, K key/value heads, R query heads per key/value head, A = K R, D head dimension.

use super::attention::{Heads, MASKED, bounded, last, within};
use super::layer_ops::{Broadcast, Dims, dot};
use super::{Axis, AxisRules, Compute};
use crate::leaves::{all, first};
use grpo_stablehlo::{Builder, Dtype, Reducer, Save, TensorType, Traced, Unary, Value, trace};

/// Name of the attention output and of its `lse` for [`Save::Named`]: if they are saved, the backward pass does not recompute attention.
pub const ATTENTION: &str = "attention";

/// The sizes of blockwise attention.
///
/// A block is a slice of the token dimension of heads, `[B, K, R, T, D]` or `[B, K, T, D]`. libtpu lays out the tokens of a head
/// contiguously, so blocks begin at tile boundaries and are sliced without a relayout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blockwise<'a> {
    rows: usize,
    /// T rounded up to a multiple of C: padding is after the last token, so the causal mask hides it.
    length: usize,
    /// C.
    block: usize,
    /// The number of tokens that a token attends to, if it is limited.
    window: Option<usize>,
    kv: usize,
    group: usize,
    width: usize,
    scale: f64,
    compute: Compute,
    rules: &'a AxisRules,
}

/// Whether a tensor belongs to queries or to keys and values; a block of it has the same dimensions.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// `[B, K, R, T, ...]`, or a block of it, `[B, K, R, C, ...]`.
    Queries,
    /// `[B, K, T, ...]`, or a block of it, `[B, K, C, ...]`.
    Keys,
}

impl Of {
    /// Returns the index of the token dimension.
    fn tokens(self) -> usize {
        match self {
            Self::Queries => 3,
            Self::Keys => 2,
        }
    }
}

impl<'a> Blockwise<'a> {
    /// Creates the sizes for these heads, with blocks of equal size and at most `block` tokens.
    pub(super) fn new(
        heads: &Heads,
        block: usize,
        window: Option<usize>,
        scale: f64,
        compute: Compute,
        rules: &'a AxisRules,
    ) -> Self {
        let [rows, kv, group, length, width] = heads.queries.dims();
        let blocks = length.div_ceil(block);
        let block = length.div_ceil(blocks);
        Self { rows, length: blocks * block, block, window, kv, group, width, scale, compute, rules }
    }

    /// Returns attention `[B, T, A D]`, f32. `positions` `[B, T]`, i32, is needed if sequences share rows. `sinks` `[K, R]`, f32, are the
    /// logits of sinks.
    pub(super) fn attend(self, heads: &Heads, positions: Option<&Value>, sinks: Option<&Value>) -> Value {
        let Self { rows, kv, group, width, .. } = self;
        let tokens = heads.queries.shape()[3];
        let [queries, keys, values] =
            [(&heads.queries, Of::Queries), (&heads.keys, Of::Keys), (&heads.values, Of::Keys)]
                .map(|(part, of)| self.of_heads(&self.padded(part, 0.0, of.tokens()), of));
        let positions = positions.map(|positions| self.padded(positions, 0, 1));
        let arguments: Vec<&Value> = [&queries, &keys, &values].into_iter().chain(&positions).collect();
        let types: Vec<TensorType> = arguments.iter().map(|value| value.ty().clone()).collect();
        let (forward, backward) = (self.forward(&types, sinks.is_some()), self.backward(&types, sinks.is_some()));
        let arguments: Vec<&Value> = arguments.into_iter().chain(sinks).collect();
        let mixed = queries.builder().custom_vjp(&forward, &backward, &arguments, 1).swap_remove(0);
        mixed.slice(&[0; 3], &[rows, tokens, kv * group * width]).convert(Dtype::F32)
    }

    /// Reshapes the tokens `[B, T, A D]` of a row to heads `[B, K, R, T, D]`.
    fn heads_of(self, tokens: &Value) -> Value {
        let Self { rows, length, kv, group, width, .. } = self;
        self.of_heads(&tokens.reshape(&[rows, length, kv, group, width]).transpose(&[0, 2, 3, 1, 4]), Of::Queries)
    }

    /// Reshapes the attention output `[B, K, R, T, D]` to the tokens `[B, T, A D]` of a row. It is rounded first, because the next product
    /// would round it anyway, and the transpose of narrow values takes half the time.
    fn of_tokens(self, mixed: &Value) -> Value {
        let Self { rows, length, kv, group, width, .. } = self;
        let narrow = mixed.convert(self.compute.dtype());
        narrow.transpose(&[0, 3, 1, 2, 4]).reshape(&[rows, length, kv * group * width])
    }

    /// Shards a block or a row of heads, `[B, K, ...]` or `[B, K, R, ...]`, by rows and heads only, so that scores never need keys of another device.
    fn of_heads(self, heads: &Value, of: Of) -> Value {
        let mut dimensions = vec![None; heads.shape().len()];
        let axes = [Some(Axis::Batch), Some(Axis::Kv), Some(Axis::Heads)];
        dimensions[..of.tokens()].copy_from_slice(&axes[..of.tokens()]);
        self.rules.constrain(heads, &dimensions)
    }

    /// Pads `part` with `number` after its last token, along `dimension`.
    fn padded(self, part: &Value, number: impl Into<grpo_stablehlo::Number>, dimension: usize) -> Value {
        let mut high = vec![0; part.shape().len()];
        high[dimension] = self.length - part.shape()[dimension];
        if high[dimension] == 0 {
            return part.clone();
        }
        part.pad(&part.builder().scalar(number, part.dtype()), &vec![0; high.len()], &high)
    }

    /// Returns the type of sinks, if there are any.
    fn sinks(self, has_sinks: bool) -> Option<TensorType> {
        has_sinks.then(|| f32s(&[self.kv, self.group]))
    }

    /// Traces the forward pass: from queries, keys, values (and positions, and sinks) to the attention output `[B, T, A D]` in the compute dtype,
    /// followed by the residuals of [`Blockwise::backward`]. Computed residuals are named [`ATTENTION`].
    fn forward(self, types: &[TensorType], has_sinks: bool) -> Traced {
        let queries = [self.rows, self.kv, self.group, self.length];
        let (numbers, mixed) = (f32s(&queries), f32s(&[&queries[..], &[self.width]].concat()));
        let carried = [numbers.clone(), numbers, mixed];
        let iteration = self.iteration(&carried, types, |at, carried, constants| {
            let [max, sum, mixed] = all(carried);
            let ([queries, keys, values], positions) = first(constants);
            let (queries, keys, sight) = (at.queries(queries), at.keys(keys), at.sight(positions));
            let before = at.queries(max);
            let now = before.max(&self.scores(&queries, &keys, &sight).reduce(Reducer::Max, &[4]));
            // Computing scores twice, for the maxima and for the weights, is cheaper than writing and reading them. The barrier is on the keys,
            // because libtpu writes its operands, and the queries of all heads of a group are more.
            let again = keys.builder().optimization_barrier(&[&now, &keys]);
            let [now, keys] = all(&again);
            // If a query attends to no key so far, its masked scores have weights of 1. The diagonal block comes last and contains the
            // query's own key, so its maximum is an unmasked score, and the wrong weights decay to 0.
            let decay = (&before - now).exp();
            let [more, weight] = self.mix(&self.scores(&queries, keys, &sight), now, &at.keys(values));
            let old = at.queries(mixed);
            vec![
                at.put(Of::Queries, max, now),
                at.put(Of::Queries, sum, &(at.queries(sum) * &decay + weight)),
                at.put(Of::Queries, mixed, &(&old * decay.along_first(&old) + more)),
            ]
        });
        let takes: Vec<TensorType> = types.iter().cloned().chain(self.sinks(has_sinks)).collect();
        let forward = trace(&takes, |f, arguments| {
            let (own, sinks) = arguments.split_at(types.len());
            let zeros = carried.each_ref().map(|ty| f.splat(0.0, ty.clone()));
            let [max, sum] = match sinks {
                [sinks] => [sinks.broadcast_in_dim(zeros[0].shape(), &[1, 2]), zeros[1].like(1.0)],
                _ => [zeros[0].like(MASKED), zeros[1].clone()],
            };
            let out = self.over_pairs(f, &iteration, &[&max, &sum, &zeros[2]], &own.iter().collect::<Vec<_>>());
            let [max, sum, mixed] = all(&out);
            let mixed = self.of_tokens(&normalised(mixed, sum)).named(ATTENTION);
            let lse = (max + sum.log()).named(ATTENTION);
            std::iter::once(mixed.clone()).chain(arguments.iter().cloned()).chain([mixed, lse]).collect()
        });
        forward.expect("blocks are slices of the whole tensor")
    }

    /// Traces the backward pass: from queries, keys, values (and positions, and sinks), the attention output `[B, T, A D]`, the log-sum-exp
    /// `[B, K, R, T]` and the cotangent of the output, to the cotangents of queries, keys and values (and sinks).
    ///
    /// With the log-sum-exp as a constant shift, attention is a sum over pairs of blocks, divided by a sum that is then 1. So the cotangent
    /// of the sum over pairs is the cotangent of the output, and the cotangent of the divisor is minus its product with the output. The rest
    /// is the derivative of [`Blockwise::scores`] and [`Blockwise::mix`] for every pair.
    fn backward(self, types: &[TensorType], has_sinks: bool) -> Traced {
        let [queries, keys] = [&types[0], &types[1]].map(|ty| ty.with_dtype(Dtype::F32));
        let lse = f32s(&queries.shape[..4]);
        let own = types.len();
        let pair = self.pair();
        let constants = [types, &[lse.clone(), types[0].clone(), lse.clone()]].concat();
        let carried = [queries.clone(), keys.clone(), keys];
        let iteration = self.iteration(&carried, &constants, |at, sums, constants| {
            let (parts, rest) = constants.split_at(own);
            let ([queries, keys, values], positions) = first(parts);
            let [lse, mixed, sum] = all(rest);
            let wide = |part: Value| part.convert(Dtype::F32);
            let given = [wide(at.queries(queries)), wide(at.keys(keys)), wide(at.keys(values))];
            let (lse, sight) = (at.queries(lse), at.sight(positions));
            let given: Vec<&Value> = given.iter().chain([&lse, &sight]).collect();
            let derivative = at.zero.builder().vjp(&pair, &given, &[0, 1, 2]);
            let (_, pullback) = derivative.expect("products, exponentials and sums have derivatives");
            let pulled = pullback.call(&[&wide(at.queries(mixed)), &at.queries(sum)]);
            let places = [Of::Queries, Of::Keys, Of::Keys];
            let parts = sums.iter().zip(places).zip(&pulled);
            parts.map(|((sum, of), part)| at.put(of, sum, &(at.get(of, sum) + part))).collect()
        });
        let mixed = TensorType::new(self.compute.dtype(), [self.rows, self.length, self.kv * self.group * self.width]);
        let takes = types.iter().cloned().chain(self.sinks(has_sinks)).chain([mixed.clone(), lse, mixed]);
        let takes: Vec<TensorType> = takes.collect();
        let backward = trace(&takes, |f, arguments| {
            let (sinks, rest) = arguments[own..].split_at(usize::from(has_sinks));
            let [mixed, lse, cotangent] = all(rest);
            // Summed before tokens become heads, whose layout in f32 would be another copy.
            let products = mixed.convert(Dtype::F32) * cotangent.convert(Dtype::F32);
            let products = products.reshape(&[self.rows, self.length, self.kv, self.group, self.width]);
            let of_sum = self.of_heads(&-products.reduce(Reducer::Add, &[4]).transpose(&[0, 2, 3, 1]), Of::Queries);
            let of_mixed = self.heads_of(cotangent);
            let constants: Vec<&Value> = arguments[..own].iter().chain([lse, &of_mixed, &of_sum]).collect();
            let sums = carried.each_ref().map(|ty| f.splat(0.0, ty.clone()));
            let sums = self.over_pairs(f, &iteration, &sums.each_ref(), &constants);
            let sums = sums.iter().map(|sum| sum.convert(types[0].dtype));
            // A sink has the probability exp(sink - lse), and no value.
            let of_sinks = sinks.first().map(|sinks| {
                let shares = (sinks.broadcast_in_dim(lse.shape(), &[1, 2]) - lse).exp();
                (shares * &of_sum).reduce(Reducer::Add, &[0, 3])
            });
            let sums: Vec<Value> = sums.chain(of_sinks).collect();
            // The barrier keeps compilers from widening the gradients again before they transpose them.
            f.optimization_barrier(&sums.iter().collect::<Vec<_>>())
        });
        backward.expect("blocks are slices of the whole tensor")
    }

    /// Traces the contribution of a pair of blocks, as a function of queries, keys, values, the shift of the scores and the mask. Operands
    /// are rounded inside, so that their cotangents are not rounded.
    fn pair(self) -> Traced {
        let Self { rows, kv, group, block, width, .. } = self;
        let (queries, keys) = (f32s(&[rows, kv, group, block, width]), f32s(&[rows, kv, block, width]));
        let shift = f32s(&queries.shape[..4]);
        let sight = TensorType::new(Dtype::Pred, [rows, kv, group, block, block]);
        let pair = trace(&[queries, keys.clone(), keys, shift, sight], |_, a| {
            let [queries, keys, values] = [&a[0], &a[1], &a[2]].map(|part| part.convert(self.compute.dtype()));
            self.mix(&self.scores(&queries, &keys, &a[4]), &a[3], &values).to_vec()
        });
        pair.expect("queries and keys are of one width")
    }

    /// Returns the scores `[B, K, R, C, C]` of queries `[B, K, R, C, D]` and keys `[B, K, C, D]`.
    fn scores(self, queries: &Value, keys: &Value, sight: &Value) -> Value {
        let scores = self.of_heads(&dot(queries, keys, (&[0, 1], &[0, 1]), (4, 3), self.compute), Of::Queries);
        let scores = &scores * scores.like(self.scale);
        sight.select(&scores, &scores.like(MASKED))
    }

    /// Returns the values `[B, K, C, D]` weighted with `exp(scores - shift)`, `[B, K, R, C, D]`, and the sums of the weights,
    /// `[B, K, R, C]`.
    fn mix(self, scores: &Value, shift: &Value, values: &Value) -> [Value; 2] {
        let [weights, sums] = self.weights(&(scores - shift.along_first(scores)));
        [dot(&weights, values, (&[0, 1], &[0, 1]), (4, 2), self.compute), sums]
    }

    /// Returns `exp(scores)` in the compute dtype, and its sums over keys in f32. The products and the derivative use the same rounded
    /// weights, the only residual of the scores: f32 scores would move twice the bytes.
    fn weights(self, scores: &Value) -> [Value; 2] {
        let (wide, rounded) = (scores.ty().clone(), scores.ty().with_dtype(self.compute.dtype()));
        let forward = trace(std::slice::from_ref(&wide), |f, a| {
            let weights = a[0].unary(Unary::Exponential);
            let sums = weights.reduce(Reducer::Add, &[4]);
            let weights = f.optimization_barrier(&[&weights.convert(rounded.dtype)]).swap_remove(0);
            vec![weights.clone(), sums, weights]
        });
        let backward = trace(&[rounded.clone(), rounded.clone(), f32s(&wide.shape[..4])], |_, a| {
            let [weights, of_weights] = [&a[0], &a[1]].map(|part| part.convert(Dtype::F32));
            vec![(&of_weights + a[2].along_first(&of_weights)) * weights]
        });
        let (forward, backward) = (forward.expect("one exponential"), backward.expect("one product"));
        all(&scores.builder().custom_vjp(&forward, &backward, &[scores], 2)).clone()
    }

    /// Traces one iteration of the loop over pairs: `body` gets the offsets of the pair, the loop carry and the constants.
    fn iteration(
        self,
        carried: &[TensorType],
        constants: &[TensorType],
        body: impl FnOnce(&Pair<'_>, &[Value], &[Value]) -> Vec<Value>,
    ) -> Traced {
        let index = TensorType::scalar(Dtype::I32);
        let types = [carried, &[index.clone(), index], constants].concat();
        let iteration = trace(&types, |f, values| {
            let (carried, rest) = values.split_at(carried.len());
            let (at, constants) = rest.split_at(2);
            // The visible multiplication by the block size shows libtpu that blocks begin at tile boundaries.
            let [queries, keys] = [&at[0], &at[1]].map(|block| block * block.like(self.block as i64));
            let pair = Pair { sizes: self, queries, keys, zero: f.scalar(0, Dtype::I32) };
            body(&pair, carried, constants)
        });
        iteration.expect("blocks are slices of the whole tensor")
    }

    /// Runs the loop over all pairs of blocks that are not above the diagonal, nor before the window, and returns the final carry.
    fn over_pairs(self, f: &Builder, iteration: &Traced, carry: &[&Value], constants: &[&Value]) -> Vec<Value> {
        let blocks = self.length / self.block;
        // The first block of keys that the first query of block i attends to.
        let first_block =
            |i: usize| self.window.map_or(0, |window| (i * self.block + 1).saturating_sub(window) / self.block);
        let pairs: Vec<(usize, usize)> = (0..blocks).flat_map(|i| (first_block(i)..=i).map(move |j| (i, j))).collect();
        let list = |of: fn(&(usize, usize)) -> usize| {
            f.dense(pairs.iter().map(|pair| of(pair) as i64), TensorType::new(Dtype::I32, [pairs.len()]))
        };
        let (queries, keys) = (list(|pair| pair.0), list(|pair| pair.1));
        f.scan(pairs.len(), iteration, carry, &[&queries, &keys], constants, Save::Carry).carry
    }
}

/// The offsets of a pair of blocks.
struct Pair<'a> {
    sizes: Blockwise<'a>,
    /// First token of the block of queries.
    queries: Value,
    /// First token of the block of keys.
    keys: Value,
    zero: Value,
}

impl Pair<'_> {
    /// Returns the start indices of the block in `whole`.
    fn place(&self, of: Of, whole: &Value) -> Vec<&Value> {
        let first = match of {
            Of::Queries => &self.queries,
            Of::Keys => &self.keys,
        };
        (0..whole.shape().len()).map(|d| if d == of.tokens() { first } else { &self.zero }).collect()
    }

    fn get(&self, of: Of, whole: &Value) -> Value {
        let mut sizes = whole.shape().to_vec();
        sizes[of.tokens()] = self.sizes.block;
        whole.dynamic_slice(&self.place(of, whole), &sizes)
    }

    fn put(&self, of: Of, whole: &Value, block: &Value) -> Value {
        whole.dynamic_update_slice(block, &self.place(of, whole))
    }

    fn queries(&self, whole: &Value) -> Value {
        self.get(Of::Queries, whole)
    }

    fn keys(&self, whole: &Value) -> Value {
        self.get(Of::Keys, whole)
    }

    /// Returns the mask `[B, K, R, C, C]`: queries attend to themselves and to earlier tokens of their sequence, within the window.
    fn sight(&self, positions: &[Value]) -> Value {
        let Blockwise { rows, kv, block, window, group, .. } = self.sizes;
        let scores = [rows, kv, group, block, block];
        let square = TensorType::new(Dtype::I32, [block, block]);
        let f = self.zero.builder();
        let behind = f.iota(0, square.clone()) - f.iota(1, square);
        let apart = (&self.keys - &self.queries).broadcast_in_dim(behind.shape(), &[]);
        let [positions] = positions else {
            let sight = match window {
                None => behind.ge(&apart),
                Some(window) => within(&(&behind - &apart), &apart.like(last(window))),
            };
            return sight.broadcast_in_dim(&scores, &[3, 4]);
        };
        let positions = bounded(positions, window).dynamic_slice(&[&self.zero, &self.queries], &[rows, block]);
        let positions = positions.broadcast_in_dim(&scores, &[0, 3]);
        within(&(behind - apart).broadcast_in_dim(&scores, &[3, 4]), &positions)
    }
}

/// Divides the attention output by the sums of its weights.
fn normalised(mixed: &Value, sums: &Value) -> Value {
    mixed / sums.along_first(mixed)
}

fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::F32, shape)
}

#[cfg(test)]
mod tests;
