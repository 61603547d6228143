//! The gated delta rule (arXiv 2412.06464), in chunks of tokens (arXiv 2406.06484) or token by token.
//!
//! ```text
//! for each token:
//!     S = exp(g) S
//!     S = S + k (beta (v - S^T k))^T
//!     o = S^T q
//! ```
//!
//! Within a chunk, G is the sum of g from its first token on, and the state S is that before its first token:
//!
//! ```text
//! for all chunks at once:
//!     A[i, j] = beta[i] exp(G[i] - G[j]) k[i] k[j]^T    for j < i
//!     X       = (I + A)^-1 diag(beta)
//!     P[i, j] = exp(G[i] - G[j]) q[i] k[j]^T            for j <= i
//! for each chunk:
//!     U = X (V - exp(G) K S)
//!     O = exp(G) Q S + P U
//!     S = exp(G[last]) S + K^T (exp(G[last] - G) U)
//! ```
//!
//! A sequence of a packed row begins with a state of zeros: pairs of tokens of different sequences have no terms, and a token reads the state
//! before its chunk only if its sequence has a token before the chunk.
//!
//! Legend: B rows, T tokens of a row, N chunks, C tokens of a chunk, Hk key heads, R value heads of a key head, Dk and Dv widths of keys and
//! values.

use super::super::attention::{MASKED, within};
use super::super::{Axis, AxisRules, Broadcast, Compute, Dims, dot};
use super::inverse::inverse;
use crate::leaves::all;
use grpo_stablehlo::{Builder, Dtype, Reducer, Result, Save, TensorType, Value, trace};

/// The number of tokens of a chunk, as in `transformers`.
pub(super) const CHUNK: usize = 64;

/// The tokens of rows, all f32.
pub(super) struct Tokens {
    /// Normalised and scaled, `[B, T, Hk, Dk]`.
    pub(super) queries: Value,
    /// Normalised, `[B, T, Hk, Dk]`.
    pub(super) keys: Value,
    /// `[B, T, Hk, R, Dv]`.
    pub(super) values: Value,
    /// beta, `[B, T, Hk, R]`. A token with beta 0 and g 0 does not change the state.
    pub(super) strengths: Value,
    /// g, `[B, T, Hk, R]`, at most 0.
    pub(super) decays: Value,
}

/// How the rule is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule<'a> {
    /// The largest number of tokens of a chunk.
    pub(super) chunk: usize,
    /// The precision of products. Their operands are f32, because XLA's CPU backend has no such products of bf16.
    pub(super) compute: Compute,
    pub(super) rules: &'a AxisRules,
}

impl Rule<'_> {
    /// Returns the outputs `[B, T, Hk, R, Dv]` and the state after the last token, `[B, Hk, Dk, R, Dv]`, both f32, for the state before the
    /// first token and the position of each token in its sequence, `[B, T]`, i32.
    ///
    /// # Errors
    /// Shapes do not fit.
    pub(super) fn apply(self, tokens: &Tokens, positions: &Value, state: &Value) -> Result<[Value; 2]> {
        if positions.shape()[1] == 1 { Ok(step(tokens, state)) } else { self.chunked(tokens, positions, state) }
    }

    fn chunked(self, tokens: &Tokens, positions: &Value, state: &Value) -> Result<[Value; 2]> {
        let [b, hk, dk, r, dv] = state.dims();
        let t = positions.shape()[1];
        let size = self.chunk.min(t);
        let chunks = t.div_ceil(size);
        let f = state.builder();
        // Tokens of a chunk as the dimension after B and N.
        let padding = chunks * size - t;
        let of = |x: &Value, order: &[usize]| {
            let (mut high, mut shape) = (vec![0; x.shape().len()], x.shape().to_vec());
            high[1] = padding;
            let x =
                if padding == 0 { x.clone() } else { x.pad(&f.scalar(0.0, Dtype::F32), &vec![0; high.len()], &high) };
            shape.splice(1..2, [chunks, size]);
            x.reshape(&shape).transpose(order)
        };
        // [N, B, Hk, C, Dk], [N, B, Hk, R, Dv, C], [N, B, Hk, R, C], [N, B, C].
        let [queries, keys] = [&tokens.queries, &tokens.keys].map(|x| of(x, &[1, 0, 3, 2, 4]));
        let values = of(&tokens.values, &[1, 0, 3, 4, 5, 2]);
        let [strengths, decays] = [&tokens.strengths, &tokens.decays].map(|x| of(x, &[1, 0, 3, 4, 2]));
        // Padding continues the last sequence, and does not change its state.
        let last = positions.slice(&[0, t - 1], &[b, t]).broadcast_in_dim(&[b, padding], &[0, 1]);
        let next = &last + f.iota(1, last.ty().clone()) + last.like(1);
        let positions = f.concatenate(&[positions, &next], 1).reshape(&[b, chunks, size]).transpose(&[1, 0, 2]);
        let Decays { pairs, from_start, to_end } = Decays::new(&decays, &positions);

        let [rows, columns] = [4, 5].map(|last| [0, 1, 2, 3, last]);
        let products = |left: &Value| {
            let products = dot(left, &keys, (&[0, 1, 2], &[0, 1, 2]), (4, 4), self.compute);
            products.broadcast_in_dim(pairs.shape(), &[0, 1, 2, 4, 5]) * &pairs
        };
        let coupling = products(&keys) * strengths.broadcast_in_dim(pairs.shape(), &rows);
        let solution = inverse(&coupling)? * strengths.broadcast_in_dim(pairs.shape(), &columns);
        let attention = products(&queries);
        let xs = [&queries, &keys, &values, &solution, &attention, &from_start, &to_end].map(|x| self.of_heads(x, 1));

        let slice = |x: &Value| TensorType::new(x.dtype(), &x.shape()[1..]);
        let types: Vec<TensorType> = std::iter::once(state.ty().clone()).chain(xs.iter().map(slice)).collect();
        let chunk = trace(&types, |_, a| {
            let [state, queries, keys, values, solution, attention, from_start, to_end] = all(a);
            // [B, Hk, R, Dv, C]
            let read = |of: &Value| {
                let read = dot(state, of, (&[0, 1], &[0, 1]), (2, 3), self.compute);
                from_start.broadcast_in_dim(read.shape(), &[0, 1, 2, 4]) * read
            };
            let mixed = |x: &Value, pairs: &Value| dot(x, pairs, (&[0, 1, 2], &[0, 1, 2]), (4, 4), self.compute);
            let updates = mixed(&(values - read(keys)), solution);
            let outputs = read(queries) + mixed(&updates, attention);
            let left = &updates * to_end.broadcast_in_dim(updates.shape(), &[0, 1, 2, 4]);
            let added = dot(keys, &left, (&[0, 1], &[0, 1]), (2, 4), self.compute);
            let end = from_start.slice(&[0, 0, 0, size - 1], &[b, hk, r, size]).reshape(&[b, hk, r]);
            let next = state * end.broadcast_in_dim(state.shape(), &[0, 1, 3]) + added;
            vec![self.of_heads(&next, 0), outputs]
        })?;
        let scanned = f.scan(chunks, &chunk, &[state], &xs.each_ref(), &[], Save::Carry);
        // [N, B, Hk, R, Dv, C]
        let outputs = scanned.ys[0].transpose(&[1, 0, 5, 2, 3, 4]).reshape(&[b, chunks * size, hk, r, dv]);
        let outputs = outputs.slice(&[0; 5], &[b, t, hk, r, dv]);
        debug_assert_eq!(scanned.carry[0].shape(), [b, hk, dk, r, dv]);
        Ok([outputs, scanned.carry[0].clone()])
    }

    /// Shards dimensions `first` and `first + 1`, rows and key heads, of a tensor.
    fn of_heads(self, x: &Value, first: usize) -> Value {
        let mut dimensions = vec![None; x.shape().len()];
        dimensions[first..first + 2].copy_from_slice(&[Some(Axis::Batch), Some(Axis::LinearHeads)]);
        self.rules.constrain(x, &dimensions)
    }
}

/// The decays between tokens of a chunk; 0 between tokens of different sequences.
struct Decays {
    /// From token j, the last dimension, to a token i that is not before it, `[N, B, Hk, R, C, C]`; 0 for other pairs.
    pairs: Value,
    /// From the state before the chunk to each token, `[N, B, Hk, R, C]`.
    from_start: Value,
    /// From each token to the state after the chunk, `[N, B, Hk, R, C]`.
    to_end: Value,
}

impl Decays {
    /// Creates the decays from g `[N, B, Hk, R, C]` and positions `[N, B, C]`.
    fn new(decays: &Value, positions: &Value) -> Self {
        let f = decays.builder();
        let [n, b, hk, r, c] = decays.dims();
        let square = TensorType::new(Dtype::I32, [c, c]);
        let behind = f.iota(0, square.clone()) - f.iota(1, square);
        let until = behind.le(&behind.like(0)).convert(Dtype::F32);
        let sums = dot(decays, &until, (&[], &[]), (4, 0), Compute::F32);
        let exp = |is_there: &Value, log: &Value| is_there.select(log, &log.like(MASKED)).exp();

        let pairs = [n, b, hk, r, c, c];
        let seen = within(
            &behind.broadcast_in_dim(&[n, b, c, c], &[2, 3]),
            &positions.broadcast_in_dim(&[n, b, c, c], &[0, 1, 2]),
        );
        let [own, other] = [4, 5].map(|last| sums.broadcast_in_dim(&pairs, &[0, 1, 2, 3, last]));
        let of_pairs = exp(&seen.broadcast_in_dim(&pairs, &[0, 1, 4, 5]), &(own - other));

        let index = f.iota(2, positions.ty().clone());
        let wide = |of_tokens: &Value| of_tokens.broadcast_in_dim(sums.shape(), &[0, 1, 4]);
        let from_start = exp(&wide(&positions.gt(&index)), &sums);
        let last = positions.slice(&[0, 0, c - 1], &[n, b, c]).broadcast_in_dim(positions.shape(), &[0, 1, 2]);
        let total = sums.slice(&[0, 0, 0, 0, c - 1], &[n, b, hk, r, c]);
        let total = total.broadcast_in_dim(sums.shape(), &[0, 1, 2, 3, 4]);
        let to_end = exp(&wide(&within(&(index.like(c as i64 - 1) - &index), &last)), &(total - &sums));
        Self { pairs: of_pairs, from_start, to_end }
    }
}

/// Applies the rule to one token of each row.
fn step(tokens: &Tokens, state: &Value) -> [Value; 2] {
    let [b, hk, dk, r, dv] = state.dims();
    let [queries, keys] = [&tokens.queries, &tokens.keys].map(|x| {
        let of_state = x.reshape(&[b, hk, dk]);
        of_state.broadcast_in_dim(state.shape(), &[0, 1, 2])
    });
    let values = tokens.values.reshape(&[b, hk, r, dv]);
    let [strengths, decays] = [&tokens.strengths, &tokens.decays].map(|x| x.reshape(&[b, hk, r]));
    let state = state * decays.exp().broadcast_in_dim(state.shape(), &[0, 1, 3]);
    let read = |state: &Value, of: &Value| (state * of).reduce(Reducer::Add, &[2]);
    let update = (&values - read(&state, &keys)) * strengths.along_first(&values);
    let state = &state + keys * update.broadcast_in_dim(state.shape(), &[0, 1, 3, 4]);
    let outputs = read(&state, &queries).reshape(&[b, 1, hk, r, dv]);
    [outputs, state]
}

/// Returns a state of zeros, `[B, Hk, Dk, R, Dv]`, f32.
pub(super) fn no_state(f: &Builder, shape: [usize; 5]) -> Value {
    f.splat(0.0, TensorType::new(Dtype::F32, shape))
}
