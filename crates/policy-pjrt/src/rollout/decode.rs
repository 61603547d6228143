//! The decode program: a loop over tokens with a loop over layers inside.
//!
//! A sequence keeps keys and values of its token at position c in column c of its row of the cache, or c modulo the number of columns
//! ([`cache`](super::cache)), so its results do not depend on its slot or on when it began. Sequences are at different positions, and
//! writing to a different column of each row for every token would make compilers copy the whole cache. A call therefore collects its
//! tokens in a window, whose column is the number of the decode step and equal for all rows:
//!
//! ```text
//! window = zeros
//! for step in 0..W, while a sequence is unfinished:
//!     for each layer:
//!         window[layer, :, :, step] = keys, values of the last token of each sequence
//!         attend to the filled columns of the cache and to columns 0..=step of the window
//!     sample the next token of each unfinished sequence
//! for each row: copy the window to the columns of the positions from `base` on
//! ```
//!
//! A layer with a Gated DeltaNet has a state instead of keys and values. Every decode step replaces the states of unfinished sequences; the
//! states of finished ones stay, for the next turns of their conversations.
//!
//! Legend: L layers of a cache, B slots, S columns of a cache, C columns of it that are read, W most decode steps of a call, K key/value heads, R
//! query heads per key/value head, D head dimension, M tokens of a completion, V vocabulary, E stop ids.

use super::cache::{CachedLayers, flush};
use super::parts::{Part, attend_parts};
use super::routed::{self, RoutedLayers};
use super::sampling::{Sampler, SamplerValues, mask_words};
use super::state::{Shape, StateValues};
use crate::decoder::{Broadcast, Decoder, DeltaStates, Layers, NextTokens, ParameterValues, Role, zeros};
use crate::error::Result;
use crate::program::program_error;
use backend_tpu::plugins::Kind;
use models::Mixer;
use stablehlo::{Builder, Dtype, Module, Reducer, Save, TensorType, Value};

/// Configuration of a decode program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decode {
    pub(crate) shape: Shape,
    /// C of layers without a sliding window: the largest sequence length at the beginning of a call. Later columns are empty.
    pub(crate) columns_read: usize,
    /// W: the largest number of decode steps of a call.
    pub(crate) turns: usize,
    pub(crate) sampler: Sampler,
    pub(crate) layout: DecodeLayout,
    /// E; unused entries are -1.
    pub(crate) stop_ids: usize,
    /// `true` if the program returns the experts of the tokens, for a model with experts.
    pub(crate) routed_experts: bool,
}

/// How the loop over tokens reads weights and cache. The results differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeLayout {
    /// `true` if the layers are unrolled, so that the slices of stacked weights are constant.
    unrolled: bool,
    /// `true` if weights and cached keys are transposed before the loop, so that the contracted dimension is not innermost.
    transposed: bool,
    /// The largest size of a layer's cached keys and values, in bytes, with which cache and window are joined for one attention. Larger caches
    /// have an attention of their own.
    joined_bytes: usize,
}

impl DecodeLayout {
    /// Returns the layout for a kind of device.
    ///
    /// XLA's CPU backend copies every slice that a loop passes to a product, in every iteration the weights and the cache of every layer.
    /// It also packs a matrix whose contracted dimension is innermost element by element, which takes eight times as long as the product
    /// of a few rows. So the layers are unrolled and the weights transposed.
    ///
    /// XLA's GPU backend copies the slices of weights, too. Unrolled layers are one CUDA graph per token, whose products read slices in
    /// place. Joined keys and values take fewer kernels, but are copied; the limit is the size that was measured (docs/notes/device-programs.md).
    ///
    /// TPUs read slices in place and choose their own layouts. Quantised layers stay in a loop everywhere: unrolled, there would be dequantised
    /// weights of all layers.
    pub(crate) fn of(kind: Kind, decoder: &Decoder) -> Self {
        let unrolled = kind != Kind::Tpu && decoder.quantization().is_none();
        let joined_bytes = if kind == Kind::Cuda { 8 << 20 } else { 0 };
        Self { unrolled, transposed: unrolled && kind == Kind::Cpu, joined_bytes }
    }
}

/// The arguments of the program other than weights and state.
struct Arguments {
    sampling: SamplerValues,
    /// `[E]`, i32.
    stop_ids: Value,
    /// Largest number of tokens of each completion, `[B]`, i32.
    limits: Value,
}

/// The decode step of a program, with the inputs that every step reads.
pub(super) struct DecodeStep<'a> {
    decode: Decode,
    decoder: &'a Decoder,
    /// The weights in the layout of the loop over tokens.
    weights: ParameterValues,
    /// `[L, B, K, S, D]` of each cache.
    keys: &'a [Value],
    values: &'a [Value],
    /// The keys that attention reads; `[L, B, K, D, C]` if they are transposed.
    read: Vec<Value>,
    /// The positions in the columns, `[B, C]`, i32, for each of [`Decoder::windows`]; negative in empty columns.
    held: Vec<Value>,
    /// Position of the first token of this call, `[B]`, i32.
    base: Value,
}

/// The results of a decode step for the last token of every sequence.
pub(super) struct Forward {
    /// The logits after the token, `[B, V]`.
    pub(super) logits: Value,
    /// The window with the token's keys and values.
    pub(super) window: Window,
    /// The states after the token.
    pub(super) delta: Option<DeltaStates>,
    /// The token's experts, `[B, L k]`, i32, if they are recorded.
    routed: Option<Value>,
}

/// Records of the tokens of a call, with a column for each decode step.
struct Recorded {
    /// The sampling masks of the sampled tokens, `[B, W, words]`.
    masks: Option<Value>,
    /// The experts of the tokens before the sampled ones, `[B, W, L k]`.
    routed: Option<Value>,
}

impl Recorded {
    fn parts(&self) -> impl Iterator<Item = &Value> {
        self.masks.iter().chain(&self.routed)
    }

    /// Returns the records in these values, which are in the order of [`Recorded::parts`].
    fn with(&self, parts: &[Value]) -> Self {
        let mut parts = parts.iter().cloned();
        let mut next = |has: bool| if has { parts.next() } else { None };
        Self { masks: next(self.masks.is_some()), routed: next(self.routed.is_some()) }
    }
}

/// Keys and values of the tokens of this call, `[L, B, K, W, D]` of each cache.
#[derive(Clone)]
pub(super) struct Window {
    pub(super) keys: Vec<Value>,
    pub(super) values: Vec<Value>,
}

impl Window {
    /// Creates the window from keys, then values.
    pub(super) fn of(parts: &[Value]) -> Self {
        let (keys, values) = parts.split_at(parts.len() / 2);
        Self { keys: keys.to_vec(), values: values.to_vec() }
    }

    /// Returns keys, then values.
    pub(super) fn parts(&self) -> impl Iterator<Item = &Value> {
        self.keys.iter().chain(&self.values)
    }
}

impl Decode {
    /// Builds the program from weights, state, sampling arguments, stop ids (`[E]`, i32) and the largest numbers of tokens of the
    /// completions (`[B]`, i32) to the next state and, if the sampler returns them, the sampling masks of the tokens of this call. It stops
    /// early if all sequences are finished. With `routed_experts`, the last result is `[B, W, L k]`, i32, the experts of the tokens that the call has
    /// processed: column t belongs to the token from which step t samples the next one.
    pub(crate) fn module(self, decoder: &Decoder, weights: Dtype) -> Result<Module> {
        let f = Builder::new();
        let weights = decoder.declare(&f, weights);
        let state = self.shape.arguments(&f, decoder);
        let arguments = Arguments {
            sampling: SamplerValues::arguments(&f),
            stop_ids: f.argument("stop_ids", TensorType::new(Dtype::I32, [self.stop_ids])),
            limits: f.argument("max_completion_length", TensorType::new(Dtype::I32, [self.shape.slots])),
        };
        // The host ends sequences that meet the stop condition. Their limit is 0, so that no later call changes their states.
        let ended = &state.ended | state.count.ge(&arguments.limits);
        let state = StateValues { ended, ..state };
        let (step, window) = self.begin(decoder, &weights, &state);

        let (zero, turns) = (f.scalar(0, Dtype::I32), f.scalar(self.turns as i64, Dtype::I32));
        // The sampling masks of the call's tokens, `[B, W, words]`: the token of a row in step t of the call is column t.
        let masks = self
            .sampler
            .sampling_mask
            .then(|| zeros(&f, Dtype::U32, &[self.shape.slots, self.turns, mask_words(decoder.config().vocab_size)]));
        let width = routed::width(decoder.config()).filter(|_| self.routed_experts);
        let routed = width.map(|width| zeros(&f, Dtype::I32, &[self.shape.slots, self.turns, width]));
        let recorded = Recorded { masks, routed };
        let rows = state.rows();
        // The carry: the number of the step, the window, the rows of the state, and the records of the tokens.
        let first = 1 + 2 * state.keys.len();
        let end = first + rows.len();
        let carried = [&zero].into_iter().chain(window.parts()).chain(rows).chain(recorded.parts());
        let carried: Vec<&Value> = carried.collect();
        let mut error = None;
        let results = f.while_loop(
            &carried,
            |carried| {
                let open = (!&state.with_rows(&carried[first..end]).ended).reduce(Reducer::Or, &[0]);
                carried[0].lt(&turns) & open
            },
            |carried| {
                let window = Window::of(&carried[1..first]);
                let (state, before) = (state.with_rows(&carried[first..end]), recorded.with(&carried[end..]));
                let next = step.turn(&state, &window, &before, &carried[0], &arguments);
                let (state, window, after) = next.unwrap_or_else(|source| {
                    error = Some(source);
                    (state, window, before)
                });
                let turn = &carried[0] + carried[0].like(1);
                let rows = state.rows().into_iter().cloned();
                let recorded = after.parts().cloned();
                [turn].into_iter().chain(window.parts().cloned()).chain(rows).chain(recorded).collect()
            },
        );
        let name = "rollout_decode";
        if let Some(source) = error {
            return Err(program_error(name)(source));
        }
        let mut next = state.with_rows(&results[first..end]);
        let window = Window::of(&results[1..first]);
        [next.keys, next.values] = step.flush(&window).map_err(program_error(name))?;
        let Recorded { masks, routed } = recorded.with(&results[end..]);
        let masks = masks.iter().map(|masks| ("sampling_mask", masks));
        let routed = routed.iter().map(|routed| ("routed_experts", routed));
        decoder.split().finish(f, name, next.results().chain(masks).chain(routed))
    }

    /// Returns the decode step on the cache of `state`, and an empty window.
    pub(super) fn begin<'a>(
        self,
        decoder: &'a Decoder,
        weights: &ParameterValues,
        state: &'a StateValues,
    ) -> (DecodeStep<'a>, Window) {
        let f = state.length.builder();
        let weights = if self.layout.transposed { weights.transposed() } else { weights.clone() };
        let base = &state.length - state.length.like(1);
        let windows = decoder.windows().into_iter();
        let held = windows.map(|window| self.shape.columns.positions(window, &base, self.columns_read)).collect();
        let of_columns = |keys: &Value, columns: usize| {
            let mut shape = keys.shape().to_vec();
            shape[3] = columns;
            shape
        };
        let window: Vec<Value> =
            state.keys.iter().map(|keys| zeros(&f, keys.dtype(), &of_columns(keys, self.turns))).collect();
        let read = |keys: &Value| match self.layout.transposed {
            true => {
                let columns = keys.shape()[3].min(self.columns_read);
                keys.slice(&[0; 5], &of_columns(keys, columns)).transpose(&[0, 1, 2, 4, 3])
            }
            false => keys.clone(),
        };
        let read = state.keys.iter().map(read).collect();
        let (keys, values) = (&state.keys, &state.values);
        let step = DecodeStep { decode: self, decoder, weights, keys, values, read, held, base };
        (step, Window { keys: window.clone(), values: window })
    }
}

impl DecodeStep<'_> {
    /// Samples the next token of every unfinished sequence, and writes the kept tokens and the experts into `recorded`.
    fn turn(
        &self,
        state: &StateValues,
        window: &Window,
        recorded: &Recorded,
        turn: &Value,
        arguments: &Arguments,
    ) -> stablehlo::Result<(StateValues, Window, Recorded)> {
        let Decode { shape, sampler, stop_ids, .. } = self.decode;
        let Forward { logits, window, delta, routed } = self.forward(state, window, turn)?;
        let (split, seen) = (self.decoder.split(), state.seen.as_ref());
        let chosen = sampler.choose(split, &logits, &arguments.sampling, &state.random, &state.count, seen);

        let open = !&state.ended;
        let index = state.ids.builder().iota(1, state.ids.ty().clone());
        let here = index.eq(&state.count.along_first(&index)) & open.along_first(&index);
        let put = |new: &Value, old: &Value| here.select(&new.along_first(old), old);
        let step = open.convert(Dtype::I32);
        let count = &state.count + &step;
        let stop_ids = arguments.stop_ids.broadcast_in_dim(&[shape.slots, stop_ids], &[1]);
        let stopped = chosen.ids.along_first(&stop_ids).eq(&stop_ids).reduce(Reducer::Or, &[1]);
        let ends = stopped | count.ge(&arguments.limits);
        let seen = state.seen.as_ref().map(|seen| {
            let tokens = seen.builder().iota(1, seen.ty().with_dtype(Dtype::I32));
            seen | tokens.eq(&chosen.ids.along_first(&tokens))
        });
        let next = StateValues {
            ids: put(&chosen.ids, &state.ids),
            logps: put(&chosen.logps, &state.logps),
            last: open.select(&chosen.ids, &state.last),
            length: &state.length + &step,
            count,
            ended: &state.ended | ends,
            seen,
            delta,
            ..state.clone()
        };
        let put = |(all, of_step): (&Value, Value)| {
            let [slots, width] = [0, 1].map(|d| of_step.shape()[d]);
            all.dynamic_update_slice(&of_step.reshape(&[slots, 1, width]), &[&turn.like(0), turn, &turn.like(0)])
        };
        let masks = recorded.masks.as_ref().zip(chosen.kept).map(put);
        let routed = recorded.routed.as_ref().zip(routed).map(put);
        Ok((next, window, Recorded { masks, routed }))
    }

    /// Computes the last token of every sequence.
    pub(super) fn forward(&self, state: &StateValues, window: &Window, turn: &Value) -> stablehlo::Result<Forward> {
        let Self { decode, decoder, weights, read: keys, values, held, .. } = self;
        let slots = decode.shape.slots;
        let position = &state.length - state.length.like(1);
        let positions = position.reshape(&[slots, 1]);
        let rotaries = decoder.rotaries(&positions);
        let x = decoder.embed(weights, &state.last.reshape(&[slots, 1]));
        let f = x.builder();
        // The token attends to itself through the window.
        let columns = f.iota(1, TensorType::new(Dtype::I32, [slots, decode.turns]));
        let done = columns.le(&turn.broadcast_in_dim(columns.shape(), &[]));
        // The columns of the cache and of the window that the token attends to, for each sliding window of the model.
        let caches = CachedLayers::of(decoder.config());
        let windows = decoder.windows();
        let seen: Vec<[Value; 2]> = windows
            .iter()
            .zip(held)
            .map(|(window, held)| match window {
                None => [held.ge(&held.like(0)), done.clone()],
                Some(window) => {
                    let first = |last: &Value| last - last.like(*window as i64 - 1);
                    [
                        held.ge(&first(&position).max(&position.like(0)).along_first(held)),
                        &done & columns.ge(&first(turn).broadcast_in_dim(columns.shape(), &[])),
                    ]
                }
            })
            .collect();
        // Finished sequences have no next token.
        let counts = (!&state.ended).convert(Dtype::I32);
        let of_delta = [&positions, &counts];
        let of_delta = if state.delta.is_some() { &of_delta[..] } else { &[] };
        let cached: Vec<&Value> = keys.iter().chain(*values).collect();
        let of_windows: Vec<&Value> = seen.iter().flatten().collect();
        let constants = [&rotaries.values()[..], &cached, &[turn], of_delta, &of_windows].concat();
        let of_states = cached.len() + state.delta.iter().flat_map(DeltaStates::parts).count();
        let routed = RoutedLayers::of(decoder.config(), decode.routed_experts, [slots, 1]);
        let empty = routed.empty(&f);
        let carry = [&x].into_iter().chain(window.parts());
        let carry = carry.chain(state.delta.iter().flat_map(DeltaStates::parts));
        let carry: Vec<&Value> = carry.chain(&empty).collect();
        let layers = if decode.layout.unrolled { Layers::Unrolled } else { Layers::Loop(Save::Carry) };
        let carried = decoder.over_layers(weights, &carry, &constants, layers, |spec, layer, of| {
            let mut constants = of.constants;
            let rotaries = rotaries.take(&mut constants);
            let (cached, constants) = constants.split_at(cached.len());
            let [turn, constants @ ..] = constants else { unreachable!("as passed in") };
            let (of_delta, seen) = constants.split_at(of_delta.len());
            let [x, carried @ ..] = of.carry else { unreachable!("as passed in") };
            let (carried, of_experts) = carried.split_at(of_states);
            let (window, delta) = carried.split_at(cached.len());
            let (mut window, mut delta) = (Window::of(window), DeltaStates::of(delta));
            let (x, routing) = decoder.block(layer, x, None, |x| match (spec.mixer, &mut delta, of_delta) {
                (Mixer::GatedDeltaNet, Some(states), [positions, counts]) => {
                    decoder.continue_delta_net(layer, x, NextTokens { positions, counts }, states, of.number)
                }
                _ => Ok(decoder.attention(spec, layer, x, rotaries.get(spec.rope), |heads| {
                    let cache = CachedLayers::position(&caches, decoder.config(), spec);
                    let columns_read = decode.shape.columns.of(spec.sliding_window).min(decode.columns_read);
                    let (keys, values) = (&cached[cache], &cached[caches.len() + cache]);
                    let at = 2 * windows.iter().position(|window| *window == spec.sliding_window).unwrap_or(0);
                    let [filled, done] = &seen[at..at + 2] else { unreachable!("two for each window") };
                    let (own_keys, own_values) = (&mut window.keys[cache], &mut window.values[cache]);
                    *own_keys = put_token(own_keys, &heads.keys, of.number, turn);
                    *own_values = put_token(own_values, &heads.values, of.number, turn);
                    let part = |keys: &Value, values: &Value, columns, transposed, seen: &Value| Part {
                        // Transposed keys are already cut to these columns; their last two dimensions are swapped.
                        keys: columns_of(keys, of.number, if transposed { keys.shape()[3] } else { columns }),
                        transposed,
                        values: columns_of(values, of.number, columns),
                        seen: seen.clone(),
                    };
                    let cached = part(keys, values, columns_read, decode.layout.transposed, filled);
                    let own = part(own_keys, own_values, decode.turns, false, done);
                    let parts = match cached.bytes() <= decode.layout.joined_bytes {
                        true => vec![cached.joined(&own)],
                        false => vec![cached, own],
                    };
                    attend_parts(decoder, heads, &parts, layer.get(Role::Sinks))
                })),
            })?;
            let delta = delta.iter().flat_map(DeltaStates::parts);
            let of_experts = routed.put(of_experts, of, routing.as_ref());
            Ok([&x].into_iter().chain(window.parts()).chain(delta).cloned().chain(of_experts).collect())
        })?;
        let [x, carried @ ..] = &carried[..] else { unreachable!("as many as are carried") };
        let (carried, of_experts) = carried.split_at(of_states);
        let (window, delta) = carried.split_at(cached.len());
        let hidden = decoder.final_norm(weights, x);
        let logits = decoder.logits(weights, &hidden.reshape(&[slots, decoder.config().hidden_size]));
        let routed = of_experts.first().map(|all| {
            let [layers, _, _, top] = *all.shape() else { unreachable!("four dimensions") };
            all.transpose(&[1, 2, 0, 3]).reshape(&[slots, layers * top])
        });
        Ok(Forward { logits, window: Window::of(window), delta: DeltaStates::of(delta), routed })
    }

    /// Writes the window into the columns of this call, and returns keys and values `[L, B, K, S, D]` of each cache.
    pub(super) fn flush(&self, window: &Window) -> stablehlo::Result<[Vec<Value>; 2]> {
        flush(self.decoder, self.decode.shape.columns, [self.keys, self.values], &self.base, window)
    }
}

/// Returns the first `columns` columns of a layer, `[B, K, columns, D]`, of a cache `[L, B, K, S, D]`.
pub(super) fn columns_of(cache: &Value, layer: &Value, columns: usize) -> Value {
    let zero = layer.like(0);
    let mut sizes = cache.shape().to_vec();
    (sizes[0], sizes[3]) = (1, columns);
    cache.dynamic_slice(&[layer, &zero, &zero, &zero, &zero], &sizes).reshape(&sizes[1..])
}

/// Writes the keys or values `[B, K, 1, D]` of one token of a layer into column `turn` of a window `[L, B, K, W, D]`.
fn put_token(window: &Value, token: &Value, layer: &Value, turn: &Value) -> Value {
    let zero = turn.like(0);
    let mut column = window.shape().to_vec();
    (column[0], column[3]) = (1, 1);
    window.dynamic_update_slice(&token.reshape(&column), &[layer, &zero, &zero, turn, &zero])
}
