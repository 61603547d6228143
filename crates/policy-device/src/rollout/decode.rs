//! The program that makes completions longer: a loop over tokens, within it one over layers.
//!
//! Every sequence has its own place: its token at position c has its keys and values in column c of its row, whenever the sequence
//! began and wherever it lies, so that what it computes is the same in any slot. The loop over layers reads the cache, and what a
//! token adds to it is written once, when the layers are through: the cache is never copied.
//!
//! Legend: L layers, B slots, S columns of the cache, C columns of it that are read, K key/value heads, R query heads of each, D width
//! of a head, M tokens of a completion, V vocabulary, E ids that end a completion.

use super::sampling::{Sampler, SamplerValues};
use super::state::{Shape, StateValues};
use crate::decoder::{Broadcast, Decoder, Heads, MASKED, ParameterValues, Rotary, dot};
use crate::error::{Error, Result};
use crate::weights::DeviceWeights;
use stablehlo::{Builder, Dtype, Module, Reducer, Save, ScatterDimensions, TensorType, Value};

/// A program that decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decode {
    pub(crate) shape: Shape,
    /// C: no sequence becomes longer within a call than there are columns that are read. The others are empty.
    pub(crate) columns_read: usize,
    pub(crate) sampler: Sampler,
    /// E; places without an id hold -1.
    pub(crate) stop_ids: usize,
}

impl Decode {
    /// The program: weights, state, the arguments of sampling, the ids that end a completion (`[E]`, i32), the largest number of
    /// tokens of a completion and of tokens of this call (i32) to the state. It ends early when all sequences have ended.
    pub(crate) fn module(self, decoder: &Decoder, weights: Dtype) -> Result<Module> {
        let (f, config) = (Builder::new(), decoder.config());
        let weights = DeviceWeights::declare(&f, config, weights);
        let state = self.shape.arguments(&f, config, decoder.compute());
        let sampling = SamplerValues::arguments(&f);
        let stop_ids = f.argument("stop_ids", TensorType::new(Dtype::I32, [self.stop_ids]));
        let limit = f.argument("max_completion_length", TensorType::scalar(Dtype::I32));
        let turns = f.argument("turns", TensorType::scalar(Dtype::I32));

        let zero = f.scalar(0, Dtype::I32);
        let carried: Vec<&Value> = std::iter::once(&zero).chain(state.parts()).collect();
        let mut error = None;
        let results = f.while_loop(
            &carried,
            |carried| {
                let open = (!&StateValues::new(carried[1..].to_vec()).ended).reduce(Reducer::Or, &[0]);
                carried[0].lt(&turns) & open
            },
            |carried| {
                let state = StateValues::new(carried[1..].to_vec());
                let next = self.turn(decoder, &weights, &state, &sampling, &stop_ids, &limit);
                let next = next.unwrap_or_else(|source| {
                    error = Some(source);
                    state
                });
                std::iter::once(&carried[0] + carried[0].like(1)).chain(next.parts().into_iter().cloned()).collect()
            },
        );
        let name = "rollout_decode";
        match error {
            Some(source) => Err(Error::Program { program: name.into(), source }),
            None => StateValues::new(results[1..].to_vec()).finish(f, name),
        }
    }

    /// One more token of every sequence that has not ended.
    fn turn(
        self,
        decoder: &Decoder,
        weights: &ParameterValues,
        state: &StateValues,
        sampling: &SamplerValues,
        stop_ids: &Value,
        limit: &Value,
    ) -> stablehlo::Result<StateValues> {
        let open = !&state.ended;
        let column = &state.length - state.length.like(1);
        let (logits, keys, values) = self.forward(decoder, weights, state, &column)?;
        let chosen = self.sampler.choose(&logits, sampling, &state.random, &state.count, state.seen.as_ref());

        // What has ended writes behind the end, which is nowhere.
        let column = open.select(&column, &column.like(self.shape.columns as i64));
        let index = state.ids.builder().iota(1, state.ids.ty().clone());
        let here = index.eq(&state.count.along_first(&index)) & open.along_first(&index);
        let put = |new: &Value, old: &Value| here.select(&new.along_first(old), old);
        let step = open.convert(Dtype::I32);
        let count = &state.count + &step;
        let one_of = stop_ids.broadcast_in_dim(&[self.shape.slots, self.stop_ids], &[1]);
        let stopped = chosen.ids.along_first(&one_of).eq(&one_of).reduce(Reducer::Or, &[1]);
        let ends = stopped | count.ge(&limit.broadcast_in_dim(count.shape(), &[]));
        let seen = state.seen.as_ref().map(|seen| {
            let tokens = seen.builder().iota(1, seen.ty().with_dtype(Dtype::I32));
            seen | tokens.eq(&chosen.ids.along_first(&tokens))
        });
        Ok(StateValues {
            keys: write(&state.keys, &keys, &column),
            values: write(&state.values, &values, &column),
            ids: put(&chosen.ids, &state.ids),
            logps: put(&chosen.logps, &state.logps),
            last: open.select(&chosen.ids, &state.last),
            length: &state.length + &step,
            count,
            ended: &state.ended | ends,
            random: state.random.clone(),
            seen,
        })
    }

    /// Logits `[B, V]` behind the last token of every sequence, which is at `column` `[B]`, and the keys and values `[L, B, K, D]` of
    /// that token.
    fn forward(
        self,
        decoder: &Decoder,
        weights: &ParameterValues,
        state: &StateValues,
        column: &Value,
    ) -> stablehlo::Result<(Value, Value, Value)> {
        let (slots, layers) = (self.shape.slots, decoder.config().num_hidden_layers);
        let rotary = decoder.rotary(&column.reshape(&[slots, 1]));
        let x = decoder.embed(weights, &state.last.reshape(&[slots, 1]));
        let f = x.builder();
        let numbers = f.iota(0, TensorType::new(Dtype::I32, [layers]));
        let columns = f.iota(1, TensorType::new(Dtype::I32, [slots, self.columns_read]));
        let filled = columns.lt(&column.along_first(&columns));
        let constants = [rotary.cos(), rotary.sin(), &filled, &state.keys, &state.values];
        let scanned = decoder.over_layers(weights, &[&x], &[&numbers], &constants, Save::Carry, |layer, of| {
            let [cos, sin, filled, keys, values] = of.constants else { unreachable!("as many as were handed over") };
            let cache = [keys, values].map(|cache| self.read(cache, &of.xs[0]));
            let mut added = vec![];
            let x = decoder.block(layer, &of.carry[0], &Rotary::new(cos, sin), |heads| {
                added = [&heads.keys, &heads.values].map(|part| part.reshape(&own_shape(part))).to_vec();
                attend_cached(decoder, heads, &cache, filled)
            });
            std::iter::once(x).chain(added).collect()
        })?;
        let hidden = decoder.final_norm(weights, &scanned.carry[0]).reshape(&[slots, decoder.config().hidden_size]);
        let [keys, values] = &scanned.ys[..] else { unreachable!("keys and values are stacked") };
        Ok((decoder.logits(weights, &hidden), keys.clone(), values.clone()))
    }

    /// The columns of a layer's cache that are read, `[B, K, C, D]`.
    fn read(self, cache: &Value, layer: &Value) -> Value {
        let zero = layer.like(0);
        let mut sizes = cache.shape().to_vec();
        (sizes[0], sizes[3]) = (1, self.columns_read);
        cache.dynamic_slice(&[layer, &zero, &zero, &zero, &zero], &sizes).reshape(&sizes[1..])
    }
}

/// `[B, K, D]` of `[B, 1, K, D]`.
fn own_shape(part: &Value) -> [usize; 3] {
    let [b, _, kv, d] = part.shape() else { unreachable!("keys and values have four dimensions") };
    [*b, *kv, *d]
}

/// Attention `[B, 1, A D]`, f32, of one token of every sequence to itself and to the columns `[B, K, C, D]` of the cache that are
/// `filled` `[B, C]`.
fn attend_cached(decoder: &Decoder, heads: &Heads, cache: &[Value; 2], filled: &Value) -> Value {
    let (compute, [keys, values]) = (decoder.compute(), cache);
    let [b, _, kv, r, d] = heads.queries.shape() else { unreachable!("queries have five dimensions") };
    let queries = heads.queries.reshape(&[*b, *kv, *r, *d]);
    let [own_keys, own_values] = [&heads.keys, &heads.values].map(|part| part.reshape(&[*b, *kv, *d]));
    let scale = |scores: Value| &scores * scores.like(decoder.score_scale());
    // [B, K, R, C]
    let scores = scale(dot(&queries, keys, (&[0, 1], &[0, 1]), (3, 3), compute));
    let scores = filled.broadcast_in_dim(scores.shape(), &[0, 3]).select(&scores, &scores.like(MASKED));
    // [B, K, R]
    let wide = own_keys.broadcast_in_dim(queries.shape(), &[0, 1, 3]).convert(Dtype::F32);
    let own = scale((queries.convert(Dtype::F32) * wide).reduce(Reducer::Add, &[3]));
    let max = scores.reduce(Reducer::Max, &[3]).max(&own);
    let weights = (&scores - max.along_first(&scores)).exp();
    let own = (own - max).exp();
    let sum = weights.reduce(Reducer::Add, &[3]) + &own;
    // [B, K, R, D]
    let mixed = dot(&weights.convert(compute.dtype()), values, (&[0, 1], &[0, 1]), (3, 2), compute);
    let own_values = own_values.broadcast_in_dim(mixed.shape(), &[0, 1, 3]).convert(Dtype::F32);
    let mixed = (&mixed + own.along_first(&mixed) * own_values) / sum.along_first(&mixed);
    mixed.reshape(&[*b, 1, kv * r * d])
}

/// The cache `[L, B, K, S, D]` with `added` `[L, B, K, D]` in column `column` `[B]` of every row, which is empty so far; a column
/// behind the last is nowhere.
fn write(cache: &Value, added: &Value, column: &Value) -> Value {
    let slots = column.shape()[0];
    let f = column.builder();
    let row = f.iota(0, column.ty().clone()).reshape(&[slots, 1]);
    let indices = f.concatenate(&[&row, &column.reshape(&[slots, 1])], 1);
    let dimensions = ScatterDimensions {
        update_window_dims: vec![0, 2, 3],
        inserted_window_dims: vec![1, 3],
        scatter_dims_to_operand_dims: vec![1, 3],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    };
    cache.scatter(&indices, added, dimensions, Reducer::Add)
}
