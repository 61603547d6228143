//! Attention block by block (arXiv 2205.14135, 2307.08691): the scores of all pairs of tokens are never there at once.
//!
//! A row is cut into blocks of tokens. One loop goes over the pairs of a block of queries and a block of keys that are not above the
//! diagonal, and carries the maxima, the sums and the mixed values of all queries; its derivative is a loop over the same pairs, which
//! computes the scores again and adds up the gradients in f32.
//!
//! Legend: B rows, T tokens of a row, C tokens of a block, K key/value heads, R query heads of each, D width of a head.

use super::attention::{Heads, MASKED, within};
use super::ops::{Broadcast, dot};
use super::{Axis, Compute, Split};
use stablehlo::{Builder, Dtype, Reducer, Save, TensorType, Traced, Unary, Value, trace};

/// The name of what attention has made of the tokens of a row, for [`Save::Named`]: with it, its derivative computes no attention again.
pub const ATTENTION: &str = "attention";

/// The sizes of attention block by block.
///
/// A block is a slice of the tokens of heads, `[B, K, R, T, D]` or `[B, K, T, D]`. libtpu keeps the tokens of a head side by side in memory, so
/// that blocks are where tiles begin, and to take one moves nothing about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blockwise<'a> {
    rows: usize,
    /// A multiple of C: what is behind the last token of a row is behind every query, so nobody sees it.
    length: usize,
    /// C.
    block: usize,
    kv: usize,
    group: usize,
    width: usize,
    scale: f64,
    compute: Compute,
    split: &'a Split,
}

/// What something is of, and has been cut from.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// `[B, K, R, T ..]`, or a block of it, `[B, K, R, C ..]`.
    Queries,
    /// `[B, K, T ..]`, or a block of it, `[B, K, C ..]`.
    Keys,
}

impl Of {
    /// The dimension that counts tokens.
    fn tokens(self) -> usize {
        match self {
            Self::Queries => 3,
            Self::Keys => 2,
        }
    }
}

impl<'a> Blockwise<'a> {
    /// For these heads, in blocks of at most `block` tokens, all of one size.
    pub(super) fn new(heads: &Heads, block: usize, scale: f64, compute: Compute, split: &'a Split) -> Self {
        let [rows, kv, group, length, width] = *heads.queries.shape() else {
            unreachable!("queries have five dimensions")
        };
        let blocks = length.div_ceil(block);
        let block = length.div_ceil(blocks);
        Self { rows, length: blocks * block, block, kv, group, width, scale, compute, split }
    }

    /// Attention `[B, T, A D]`, f32; `positions` `[B, T]`, i32, where sequences share rows.
    pub(super) fn attend(self, heads: &Heads, positions: Option<&Value>) -> Value {
        let Self { rows, kv, group, width, .. } = self;
        let tokens = heads.queries.shape()[3];
        let [queries, keys, values] =
            [(&heads.queries, Of::Queries), (&heads.keys, Of::Keys), (&heads.values, Of::Keys)]
                .map(|(part, of)| self.of_heads(&self.padded(part, 0.0, of.tokens())));
        let positions = positions.map(|positions| self.padded(positions, 0, 1));
        let arguments: Vec<&Value> = [&queries, &keys, &values].into_iter().chain(&positions).collect();
        let types: Vec<TensorType> = arguments.iter().map(|value| value.ty().clone()).collect();
        let (forward, backward) = (self.forward(&types), self.backward(&types));
        let mixed = queries.builder().custom_vjp(&forward, &backward, &arguments, 1).swap_remove(0);
        mixed.slice(&[0; 3], &[rows, tokens, kv * group * width]).convert(Dtype::F32)
    }

    /// The tokens `[B, T, A D]` of a row as heads `[B, K, R, T, D]`.
    fn heads_of(self, tokens: &Value) -> Value {
        let Self { rows, length, kv, group, width, .. } = self;
        self.of_heads(&tokens.reshape(&[rows, length, kv, group, width]).transpose(&[0, 2, 3, 1, 4]))
    }

    /// What was mixed, `[B, K, R, T, D]`, as the tokens `[B, T, A D]` of a row. What comes next is a product, which rounds it: narrow it
    /// is moved about in half the time.
    fn of_tokens(self, mixed: &Value) -> Value {
        let Self { rows, length, kv, group, width, .. } = self;
        let narrow = mixed.convert(self.compute.dtype());
        narrow.transpose(&[0, 3, 1, 2, 4]).reshape(&[rows, length, kv * group * width])
    }

    /// A block or a row of heads, `[B, K, ...]`, split by rows and heads: no device has scores of tokens whose keys are on another one.
    fn of_heads(self, heads: &Value) -> Value {
        let mut dimensions = vec![None; heads.shape().len()];
        dimensions[..2].copy_from_slice(&[Some(Axis::Batch), Some(Axis::Kv)]);
        self.split.constrain_named(heads, &dimensions)
    }

    /// `part` with `number` behind the last of its tokens, which `dimension` counts.
    fn padded(self, part: &Value, number: impl Into<stablehlo::Number>, dimension: usize) -> Value {
        let mut high = vec![0; part.shape().len()];
        high[dimension] = self.length - part.shape()[dimension];
        if high[dimension] == 0 {
            return part.clone();
        }
        part.pad(&part.builder().scalar(number, part.dtype()), &vec![0; high.len()], &high)
    }

    /// From queries, keys, values (and positions) to what is mixed, `[B, T, A D]` as products take it; then what [`Blockwise::backward`]
    /// takes. What is made here, and not given, has the name [`ATTENTION`].
    fn forward(self, types: &[TensorType]) -> Traced {
        let queries = [self.rows, self.kv, self.group, self.length];
        let (numbers, mixed) = (f32s(&queries), f32s(&[&queries[..], &[self.width]].concat()));
        let carried = [numbers.clone(), numbers, mixed];
        let turn = self.turn(&carried, types, |at, carried, constants| {
            let [max, sum, mixed] = carried else { unreachable!("as declared") };
            let [queries, keys, values, positions @ ..] = constants else { unreachable!("as declared") };
            let (queries, keys, sight) = (at.queries(queries), at.keys(keys), at.sight(positions));
            let before = at.queries(max);
            let now = before.max(&self.scores(&queries, &keys, &sight).reduce(Reducer::Max, &[4]));
            // Scores are made twice, once for their maxima and once for the weights: that is less than to write and read them.
            let again = queries.builder().optimization_barrier(&[&now, &queries, &keys]);
            let [now, queries, keys] = &again[..] else { unreachable!("as many as went in") };
            // Of a query that has seen none of these keys and of those before, masked scores count as weights of 1. The block on the
            // diagonal, which comes last, has the query's own key: its maximum is no masked score, and then they decay to 0.
            let decay = (&before - now).exp();
            let [more, weight] = self.mix(&self.scores(queries, keys, &sight), now, &at.keys(values));
            let old = at.queries(mixed);
            vec![
                at.put(Of::Queries, max, now),
                at.put(Of::Queries, sum, &(at.queries(sum) * &decay + weight)),
                at.put(Of::Queries, mixed, &(&old * decay.along_first(&old) + more)),
            ]
        });
        let forward = trace(types, |f, arguments| {
            let begun = carried.each_ref().map(|ty| f.splat(0.0, ty.clone()));
            let begun = [&begun[0].like(MASKED), &begun[1], &begun[2]];
            let out = self.over_pairs(f, &turn, &begun, &arguments.iter().collect::<Vec<_>>());
            let [max, sum, mixed] = &out[..] else { unreachable!("as many as are carried") };
            let mixed = self.of_tokens(&normalised(mixed, sum)).named(ATTENTION);
            let lse = (max + sum.log()).named(ATTENTION);
            std::iter::once(mixed.clone()).chain(arguments.iter().cloned()).chain([mixed, lse]).collect()
        });
        forward.expect("blocks are slices of what they are cut from")
    }

    /// From queries, keys, values (and positions), what was mixed, `[B, T, A D]`, the logarithms of the sums of exponentials
    /// `[B, K, R, T]`, and the cotangent of what was mixed, to those of queries, keys and values.
    ///
    /// With the logarithm as a constant shift, attention is a sum over pairs of blocks, divided by what is then 1: its derivative is
    /// that of the quotient, and for every pair that of [`Blockwise::scores`] and [`Blockwise::mix`].
    fn backward(self, types: &[TensorType]) -> Traced {
        let [queries, keys] = [&types[0], &types[1]].map(|ty| ty.with_dtype(Dtype::F32));
        let lse = f32s(&queries.shape[..4]);
        let own = types.len();
        let pair = self.pair();
        let constants = [types, &[lse.clone(), types[0].clone(), lse.clone()]].concat();
        let carried = [queries.clone(), keys.clone(), keys];
        let turn = self.turn(&carried, &constants, |at, sums, constants| {
            let (parts, rest) = constants.split_at(own);
            let [queries, keys, values, positions @ ..] = parts else { unreachable!("as declared") };
            let [lse, mixed, sum] = rest else { unreachable!("as declared") };
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
        let quotient = trace(&[queries.clone(), lse.clone()], |_, a| vec![normalised(&a[0], &a[1])]);
        let quotient = quotient.expect("sums are of the shape of what they divide");
        let mixed = TensorType::new(self.compute.dtype(), [self.rows, self.length, self.kv * self.group * self.width]);
        let takes = [types, &[mixed.clone(), lse, mixed]].concat();
        let backward = trace(&takes, |f, arguments| {
            let [mixed, lse, cotangent] = &arguments[own..] else { unreachable!("as declared") };
            let [mixed, cotangent] = [mixed, cotangent].map(|part| self.heads_of(part).convert(Dtype::F32));
            let derivative = f.vjp(&quotient, &[&mixed, &lse.like(1.0)], &[0, 1]);
            let (_, pullback) = derivative.expect("a quotient has a derivative");
            let [of_mixed, of_sum] = &pullback.call(&[&cotangent])[..] else { unreachable!("two were asked for") };
            let of_mixed = of_mixed.convert(self.compute.dtype());
            let constants: Vec<&Value> = arguments[..own].iter().chain([lse, &of_mixed, of_sum]).collect();
            let sums = carried.each_ref().map(|ty| f.splat(0.0, ty.clone()));
            let sums = self.over_pairs(f, &turn, &sums.each_ref(), &constants);
            let sums: Vec<Value> = sums.iter().map(|sum| sum.convert(types[0].dtype)).collect();
            // Compilers would widen them again before they move them about.
            f.optimization_barrier(&sums.iter().collect::<Vec<_>>())
        });
        backward.expect("blocks are slices of what they are cut from")
    }

    /// What a pair of blocks adds, as a function of queries, keys, values, a shift of the scores and what is seen. Operands are rounded
    /// inside, so that their cotangents are not.
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

    /// Scores `[B, K, R, C, C]` of queries `[B, K, R, C, D]` and keys `[B, K, C, D]`.
    fn scores(self, queries: &Value, keys: &Value, sight: &Value) -> Value {
        let scores = self.of_heads(&dot(queries, keys, (&[0, 1], &[0, 1]), (4, 3), self.compute));
        let scores = &scores * scores.like(self.scale);
        sight.select(&scores, &scores.like(MASKED))
    }

    /// Values `[B, K, C, D]` mixed with weights `exp(scores - shift)`, `[B, K, R, C, D]`, and the sums of the weights, `[B, K, R, C]`.
    fn mix(self, scores: &Value, shift: &Value, values: &Value) -> [Value; 2] {
        let [weights, sums] = self.weights(&(scores - shift.along_first(scores)));
        [dot(&weights, values, (&[0, 1], &[0, 1]), (4, 2), self.compute), sums]
    }

    /// `exp(scores)` as products take it, and its sums over keys in f32. Of what is rounded, products and the derivative see the same, and
    /// that is all that is kept of the scores: a compiler that kept scores in f32 would move twice the bytes.
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
        let mut results = scores.builder().custom_vjp(&forward, &backward, &[scores], 2).into_iter();
        [(); 2].map(|()| results.next().unwrap_or_else(|| unreachable!("two results")))
    }

    /// A turn of the loop over pairs: `body` gets the place of the pair, what is carried and the constants.
    fn turn(
        self,
        carried: &[TensorType],
        constants: &[TensorType],
        body: impl FnOnce(&Pair<'_>, &[Value], &[Value]) -> Vec<Value>,
    ) -> Traced {
        let index = TensorType::scalar(Dtype::I32);
        let types = [carried, &[index.clone(), index], constants].concat();
        let turn = trace(&types, |f, values| {
            let (carried, rest) = values.split_at(carried.len());
            let (at, constants) = rest.split_at(2);
            // Factors of 128 in plain sight: libtpu then knows that blocks begin where tiles do.
            let [queries, keys] = [&at[0], &at[1]].map(|block| block * block.like(self.block as i64));
            let pair = Pair { sizes: self, queries, keys, zero: f.scalar(0, Dtype::I32) };
            body(&pair, carried, constants)
        });
        turn.expect("blocks are slices of what they are cut from")
    }

    /// What is carried after all pairs of blocks that are not above the diagonal.
    fn over_pairs(self, f: &Builder, turn: &Traced, carry: &[&Value], constants: &[&Value]) -> Vec<Value> {
        let blocks = self.length / self.block;
        let pairs: Vec<(usize, usize)> = (0..blocks).flat_map(|i| (0..=i).map(move |j| (i, j))).collect();
        let list = |of: fn(&(usize, usize)) -> usize| {
            f.dense(pairs.iter().map(|pair| of(pair) as i64), TensorType::new(Dtype::I32, [pairs.len()]))
        };
        let (queries, keys) = (list(|pair| pair.0), list(|pair| pair.1));
        f.scan(pairs.len(), turn, carry, &[&queries, &keys], constants, Save::Carry).carry
    }
}

/// The place of a pair of blocks.
struct Pair<'a> {
    sizes: Blockwise<'a>,
    /// The first token of the block of queries.
    queries: Value,
    /// The first token of the block of keys.
    keys: Value,
    zero: Value,
}

impl Pair<'_> {
    /// Where the block begins in `whole`.
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

    /// Which queries see which keys, `[B, K, R, C, C]`: themselves and earlier ones, of their own sequence.
    fn sight(&self, positions: &[Value]) -> Value {
        let Blockwise { rows, kv, block, group, .. } = self.sizes;
        let scores = [rows, kv, group, block, block];
        let square = TensorType::new(Dtype::I32, [block, block]);
        let f = self.zero.builder();
        let behind = f.iota(0, square.clone()) - f.iota(1, square);
        let apart = (&self.keys - &self.queries).broadcast_in_dim(behind.shape(), &[]);
        let [positions] = positions else { return behind.ge(&apart).broadcast_in_dim(&scores, &[3, 4]) };
        let positions = positions.dynamic_slice(&[&self.zero, &self.queries], &[rows, block]);
        let positions = positions.broadcast_in_dim(&scores, &[0, 3]);
        within(&(behind - apart).broadcast_in_dim(&scores, &[3, 4]), &positions)
    }
}

/// What is mixed, divided by the sums of weights.
fn normalised(mixed: &Value, sums: &Value) -> Value {
    mixed / sums.along_first(mixed)
}

fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::F32, shape)
}

#[cfg(test)]
mod tests;
