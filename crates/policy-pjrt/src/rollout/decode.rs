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
//! query heads per key/value head, D head dimension, M tokens of a completion, V vocabulary with padding, E stop ids.

use super::cache::{CachedLayers, flush};
use super::layers::{Carry, KvCache, empty_record};
use super::parts::{Part, attend_parts};
use super::routed;
use super::sampling::{Sampler, SamplerValues, mask_words};
use super::state::{Shape, SlotRows, StateValues};
use super::window::Window;
use crate::decoder::{
    Broadcast, ByWindow, Decoder, DeltaStates, Dims, Heads, Layer, Layers, NextTokens, ParameterValues, Role, Rotaries,
    zeros,
};
use crate::error::Result;
use crate::leaves::{leaves, while_loop};
use crate::modules::program_error;
use grpo_backend_tpu::plugins::Kind;
use grpo_stablehlo::{Builder, Dtype, Module, Reducer, Save, TensorType, Value};

/// Configuration of a decode program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Decode {
    pub(crate) shape: Shape,
    /// C of layers without a sliding window: the largest sequence length at the beginning of a call. Later columns are empty.
    pub(crate) columns_read: usize,
    /// W: the largest number of decode steps of a call.
    pub(crate) steps: usize,
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
    caches: &'a Window,
    /// The caches that attention reads: keys are `[L, B, K, D, C]` if they are transposed.
    read: Window,
    /// The positions in the columns, `[B, C]`, i32, for each window; negative in empty columns.
    held: ByWindow<Value>,
    /// Position of the first token of this call, `[B]`, i32.
    base: Value,
}

/// The inputs of the layers of a decode step.
struct StepCache {
    rotaries: Rotaries,
    cached: Window,
    /// The number of the step, an i32 scalar.
    step: Value,
    tokens: Option<NextTokens>,
    /// The columns of the cache and of the window that the token attends to.
    seen: ByWindow<[Value; 2]>,
    decode: Decode,
}

leaves!(StepCache { rotaries, cached, step, tokens, seen }, copied: decode);

impl KvCache for StepCache {
    fn rotaries(&self) -> &Rotaries {
        &self.rotaries
    }

    fn next_tokens(&self) -> Option<NextTokens> {
        self.tokens.clone()
    }

    fn attend(&self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads, window: &mut Window) -> Value {
        let Decode { shape, columns_read, steps, layout, .. } = self.decode;
        let cache = CachedLayers::index(decoder.config(), layer.spec);
        let columns_read = shape.columns.of(layer.spec.sliding_window).min(columns_read);
        let [filled, done] = self.seen.of(layer.spec.sliding_window);
        let (own_keys, own_values) = (&mut window.keys[cache], &mut window.values[cache]);
        *own_keys = put_token(own_keys, &heads.keys, layer.number, &self.step);
        *own_values = put_token(own_values, &heads.values, layer.number, &self.step);
        let part = |keys: &Value, values: &Value, columns, transposed, seen: &Value| Part {
            // Transposed keys are already cut to these columns; their last two dimensions are swapped.
            keys: columns_of(keys, layer.number, if transposed { keys.shape()[3] } else { columns }),
            transposed,
            values: columns_of(values, layer.number, columns),
            seen: seen.clone(),
        };
        let (keys, values) = (&self.cached.keys[cache], &self.cached.values[cache]);
        let cached = part(keys, values, columns_read, layout.transposed, filled);
        let own = part(own_keys, own_values, steps, false, done);
        let parts = match cached.bytes() <= layout.joined_bytes {
            true => vec![cached.joined(&own)],
            false => vec![cached, own],
        };
        attend_parts(decoder, heads, &parts, layer.parameters.get(Role::Sinks))
    }
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
#[derive(Clone)]
struct Recorded {
    /// The sampling masks of the sampled tokens, `[B, W, words]`.
    masks: Option<Value>,
    /// The experts of the tokens before the sampled ones, `[B, W, L k]`.
    routed: Option<Value>,
}

leaves!(Recorded { masks, routed });

/// The values that the loop over tokens carries.
#[derive(Clone)]
struct Call {
    /// The number of the step, an i32 scalar.
    step: Value,
    window: Window,
    rows: SlotRows,
    recorded: Recorded,
}

leaves!(Call { step, window, rows, recorded });

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
            sampling: SamplerValues::arguments(&f, decoder.config().vocab_size),
            stop_ids: f.argument("stop_ids", TensorType::new(Dtype::I32, [self.stop_ids])),
            limits: f.argument("max_completion_length", TensorType::new(Dtype::I32, [self.shape.slots])),
        };
        // The host ends sequences that meet the stop condition. Their limit is 0, so that no later call changes their states.
        let ended = &state.rows.ended | state.rows.count.ge(&arguments.limits);
        let state = StateValues { rows: SlotRows { ended, ..state.rows }, ..state };
        let (step, window) = self.begin(decoder, &weights, &state);

        let (zero, steps) = (f.scalar(0, Dtype::I32), f.scalar(self.steps as i64, Dtype::I32));
        let record = |dtype, width| zeros(&f, dtype, &[self.shape.slots, self.steps, width]);
        let words = self.sampler.sampling_mask.then(|| mask_words(decoder.logit_columns()));
        let masks = words.map(|words| record(Dtype::U32, words));
        let width = routed::width(decoder.config()).filter(|_| self.routed_experts);
        let routed = width.map(|width| record(Dtype::I32, width));
        let call = Call { step: zero, window, rows: state.rows.clone(), recorded: Recorded { masks, routed } };
        let mut error = None;
        let last = while_loop(
            &f,
            &call,
            |call| {
                let open = (!&call.rows.ended).reduce(Reducer::Or, &[0]);
                call.step.lt(&steps) & open
            },
            |call| {
                step.next(&call, &arguments).unwrap_or_else(|source| {
                    error = Some(source);
                    call
                })
            },
        );
        let name = "rollout_decode";
        if let Some(source) = error {
            return Err(program_error(name)(source));
        }
        let caches = step.flush(&last.window).map_err(program_error(name))?;
        let next = StateValues { rows: last.rows, caches };
        let masks = last.recorded.masks.iter().map(|masks| ("sampling_mask", masks));
        let routed = last.recorded.routed.iter().map(|routed| ("routed_experts", routed));
        decoder.axis_rules().finish(f.clone(), name, next.results().chain(masks).chain(routed))
    }

    /// Returns the decode step on the cache of `state`, and an empty window.
    pub(super) fn begin<'a>(
        self,
        decoder: &'a Decoder,
        weights: &ParameterValues,
        state: &'a StateValues,
    ) -> (DecodeStep<'a>, Window) {
        let f = state.rows.length.builder();
        let weights = if self.layout.transposed { weights.transposed() } else { weights.clone() };
        let base = &state.rows.length - state.rows.length.like(1);
        let held = ByWindow::new(decoder, |window| self.shape.columns.positions(window, &base, self.columns_read));
        let with_columns = |keys: &Value, columns: usize| {
            let mut shape = keys.shape().to_vec();
            shape[3] = columns;
            shape
        };
        let caches = &state.caches;
        let window: Vec<Value> =
            caches.keys.iter().map(|keys| zeros(&f, keys.dtype(), &with_columns(keys, self.steps))).collect();
        let read = |keys: &Value| match self.layout.transposed {
            true => {
                let columns = keys.shape()[3].min(self.columns_read);
                keys.slice(&[0; 5], &with_columns(keys, columns)).transpose(&[0, 1, 2, 4, 3])
            }
            false => keys.clone(),
        };
        let read = Window { keys: caches.keys.iter().map(read).collect(), values: caches.values.clone() };
        let step = DecodeStep { decode: self, decoder, weights, caches, read, held, base };
        (step, Window { keys: window.clone(), values: window })
    }
}

impl DecodeStep<'_> {
    /// Samples the next token of every unfinished sequence, and records the kept tokens and the experts.
    fn next(&self, call: &Call, arguments: &Arguments) -> grpo_stablehlo::Result<Call> {
        let (state, step) = (&call.rows, &call.step);
        let Decode { shape, sampler, stop_ids, .. } = self.decode;
        let Forward { logits, window, delta, routed } = self.forward(state, &call.window, step)?;
        let (rules, seen) = (self.decoder.axis_rules(), state.seen.as_ref());
        let chosen = sampler.choose(rules, &logits, &arguments.sampling, &state.random, &state.count, seen);

        let open = !&state.ended;
        let index = state.ids.builder().iota(1, state.ids.ty().clone());
        let here = index.eq(&state.count.along_first(&index)) & open.along_first(&index);
        let put = |new: &Value, old: &Value| here.select(&new.along_first(old), old);
        let more = open.convert(Dtype::I32);
        let count = &state.count + &more;
        let stop_ids = arguments.stop_ids.broadcast_in_dim(&[shape.slots, stop_ids], &[1]);
        let stopped = chosen.ids.along_first(&stop_ids).eq(&stop_ids).reduce(Reducer::Or, &[1]);
        let ends = stopped | count.ge(&arguments.limits);
        let seen = state.seen.as_ref().map(|seen| {
            let tokens = seen.builder().iota(1, seen.ty().with_dtype(Dtype::I32));
            seen | tokens.eq(&chosen.ids.along_first(&tokens))
        });
        let rows = SlotRows {
            ids: put(&chosen.ids, &state.ids),
            logps: put(&chosen.logps, &state.logps),
            last: open.select(&chosen.ids, &state.last),
            length: &state.length + &more,
            count,
            ended: &state.ended | ends,
            seen,
            delta,
            ..state.clone()
        };
        let put = |(all, new): (&Value, Value)| {
            let [slots, width] = new.dims();
            all.dynamic_update_slice(&new.reshape(&[slots, 1, width]), &[&step.like(0), step, &step.like(0)])
        };
        let masks = call.recorded.masks.as_ref().zip(chosen.kept).map(put);
        let routed = call.recorded.routed.as_ref().zip(routed).map(put);
        Ok(Call { step: step + step.like(1), window, rows, recorded: Recorded { masks, routed } })
    }

    /// Computes the last token of every sequence.
    pub(super) fn forward(&self, state: &SlotRows, window: &Window, step: &Value) -> grpo_stablehlo::Result<Forward> {
        let Self { decode, decoder, weights, .. } = self;
        let slots = decode.shape.slots;
        let position = &state.length - state.length.like(1);
        let positions = position.reshape(&[slots, 1]);
        let rotaries = decoder.rotaries(&positions);
        let x = decoder.embed(weights, &state.last.reshape(&[slots, 1]));
        let f = x.builder();
        let seen = self.seen(&position, step);
        // Finished sequences have no next token.
        let counts = (!&state.ended).convert(Dtype::I32);
        let tokens = state.delta.as_ref().map(|_| NextTokens { positions, counts });
        let (cached, step, decode) = (self.read.clone(), step.clone(), *decode);
        let cache = StepCache { rotaries, cached, step, tokens, seen, decode };
        let routed = decode.routed_experts.then(|| empty_record(&f, decoder.config(), [slots, 1])).flatten();
        let carry = Carry { x, window: window.clone(), delta: state.delta.clone(), routed };
        let layers = if decode.layout.unrolled { Layers::Unrolled } else { Layers::Loop(Save::Carry) };
        let Carry { x, window, delta, routed } = carry.over_layers(decoder, weights, &cache, layers)?;
        let hidden = decoder.final_norm(weights, &x);
        let logits = decoder.logits(weights, &hidden.reshape(&[slots, decoder.config().hidden_size]));
        let routed = routed.map(|all| {
            let [layers, _, _, top] = all.dims();
            all.transpose(&[1, 2, 0, 3]).reshape(&[slots, layers * top])
        });
        Ok(Forward { logits, window, delta, routed })
    }

    /// Returns the columns of the cache, `[B, C]`, and of the window, `[B, W]`, to which the token at `position` `[B]` attends. It attends to
    /// itself through the window.
    fn seen(&self, position: &Value, step: &Value) -> ByWindow<[Value; 2]> {
        let Decode { shape, steps, .. } = self.decode;
        let columns = position.builder().iota(1, TensorType::new(Dtype::I32, [shape.slots, steps]));
        let done = columns.le(&step.broadcast_in_dim(columns.shape(), &[]));
        ByWindow::new(self.decoder, |window| {
            let held = self.held.of(window);
            let Some(window) = window else { return [held.ge(&held.like(0)), done.clone()] };
            let first = |last: &Value| last - last.like(window as i64 - 1);
            [
                held.ge(&first(position).max(&position.like(0)).along_first(held)),
                &done & columns.ge(&first(step).broadcast_in_dim(columns.shape(), &[])),
            ]
        })
    }

    /// Writes the window into the columns of this call, and returns the caches.
    pub(super) fn flush(&self, window: &Window) -> grpo_stablehlo::Result<Window> {
        flush(self.decoder, self.decode.shape.columns, self.caches, &self.base, window)
    }
}

/// Returns the first `columns` columns of a layer, `[B, K, columns, D]`, of a cache `[L, B, K, S, D]`.
pub(super) fn columns_of(cache: &Value, layer: &Value, columns: usize) -> Value {
    let zero = layer.like(0);
    let mut sizes = cache.shape().to_vec();
    (sizes[0], sizes[3]) = (1, columns);
    cache.dynamic_slice(&[layer, &zero, &zero, &zero, &zero], &sizes).reshape(&sizes[1..])
}

/// Writes the keys or values `[B, K, 1, D]` of one token of a layer into column `step` of a window `[L, B, K, W, D]`.
fn put_token(window: &Value, token: &Value, layer: &Value, step: &Value) -> Value {
    let zero = step.like(0);
    let mut column = window.shape().to_vec();
    (column[0], column[3]) = (1, 1);
    window.dynamic_update_slice(&token.reshape(&column), &[layer, &zero, &zero, step, &zero])
}
