//! Programs for prompts whose first tokens are in the KV cache of a slot: `resume` begins new samples there, and `extend` adds the keys and values
//! of the next tokens of the prompts, and computes the states of Gated DeltaNets after them.
//!
//! Legend: L layers of a cache, B slots, T tokens of an extension, S columns of a cache, C columns of it that are read, K key/value heads, D head
//! dimension.

use super::cache::{CachedLayers, flush};
use super::decode::{Window, columns_of};
use super::parts::{Part, attend_parts};
use super::prefill::Begun;
use super::routed::RoutedLayers;
use super::state::{CACHE, Shape, StateValues};
use crate::decoder::{Broadcast, Decoder, DeltaStates, Layers, NextTokens, Role, put_layer, zeros};
use crate::error::Result;
use crate::program::program_error;
use models::Mixer;
use stablehlo::{Builder, Dtype, Module, Save, TensorType, Value};

/// The numbers of tokens that one call may process; more tokens need several calls.
pub(super) const TOKENS: [usize; 2] = [16, 64];

/// Configuration of an extension program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Extend {
    pub(crate) shape: Shape,
    /// C: the largest sequence length at the beginning of the call. Later columns are empty.
    pub(crate) columns_read: usize,
    /// T.
    pub(crate) tokens: usize,
    /// `true` if the program returns the experts of the tokens, for a model with experts.
    pub(crate) routed_experts: bool,
}

/// Builds the program that begins samples in slots, with the existing KV cache. Arguments: the state, then the fields of [`Begun`]. Result: the
/// state.
pub(super) fn resume(decoder: &Decoder, shape: Shape) -> Result<Module> {
    let f = Builder::new();
    let state = shape.arguments(&f, decoder);
    let next = Begun::arguments(&f, shape).state(&state);
    decoder.split().finish(f, "rollout_resume", next.results())
}

impl Extend {
    /// Builds the program. Arguments: weights; state; the tokens to process (`[B, T]`, i32, padded; the first one of a sequence is the last token of
    /// the state); their number (`[B]`, i32; 0 leaves a sequence unchanged); the token after them (`[B]`, i32). Result: the state and,
    /// with `routed_experts`, the experts of the tokens, `[L, B, T, k]`, i32.
    pub(super) fn module(self, decoder: &Decoder, weights: Dtype) -> Result<Module> {
        let Self { shape, columns_read, tokens, routed_experts } = self;
        let (f, name) = (Builder::new(), "rollout_extend");
        let weights = decoder.declare(&f, weights);
        let state = shape.arguments(&f, decoder);
        let ids = f.argument("ids", TensorType::new(Dtype::I32, [shape.slots, tokens]));
        let counts = f.argument("counts", TensorType::new(Dtype::I32, [shape.slots]));
        let behind = f.argument("behind", TensorType::new(Dtype::I32, [shape.slots]));

        let base = &state.length - state.length.like(1);
        let index = f.iota(1, ids.ty().clone());
        let positions = &index + base.along_first(&index);
        let rotaries = decoder.rotaries(&positions);
        let x = decoder.embed(&weights, &ids);
        let windows = decoder.windows();
        let masks: Vec<[Value; 2]> = windows.iter().map(|window| self.masks(&f, &base, &positions, *window)).collect();
        let of_delta = [&positions, &counts];
        let of_delta = if state.delta.is_some() { &of_delta[..] } else { &[] };
        let of_masks: Vec<&Value> = masks.iter().flatten().collect();
        let cached: Vec<&Value> = state.keys.iter().chain(&state.values).collect();
        let constants = [&rotaries.values()[..], &cached, of_delta, &of_masks].concat();
        let caches = CachedLayers::of(decoder.config());
        let empty = |cache: &CachedLayers| {
            let ty = cache.ty(decoder.compute(), shape.slots, tokens);
            decoder.split().constrain(&zeros(&f, ty.dtype, &ty.shape), &CACHE)
        };
        let window: Vec<Value> = caches.iter().map(empty).collect();
        let of_states = cached.len() + state.delta.iter().flat_map(DeltaStates::parts).count();
        let routed = RoutedLayers::of(decoder.config(), routed_experts, [shape.slots, tokens]);
        let record = routed.empty(&f);
        let carry = [&x].into_iter().chain(&window).chain(&window);
        let carry = carry.chain(state.delta.iter().flat_map(DeltaStates::parts));
        let carry: Vec<&Value> = carry.chain(&record).collect();
        let layers = Layers::Loop(Save::Carry);
        let carried = decoder.over_layers(&weights, &carry, &constants, layers, |spec, layer, of| {
            let mut constants = of.constants;
            let rotaries = rotaries.take(&mut constants);
            let (cached, constants) = constants.split_at(cached.len());
            let (of_delta, masks) = constants.split_at(of_delta.len());
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
                    let columns = shape.columns.of(spec.sliding_window).min(columns_read);
                    let at = 2 * windows.iter().position(|window| *window == spec.sliding_window).unwrap_or(0);
                    let [filled, own] = &masks[at..at + 2] else { unreachable!("two for each window") };
                    for (all, part) in
                        [(&mut window.keys[cache], &heads.keys), (&mut window.values[cache], &heads.values)]
                    {
                        *all = put_layer(all, of.number, part);
                    }
                    let part = |keys: Value, values: Value, seen: &Value| Part {
                        keys,
                        transposed: false,
                        values,
                        seen: seen.clone(),
                    };
                    let [keys, values] =
                        [cache, caches.len() + cache].map(|index| columns_of(&cached[index], of.number, columns));
                    let own = part(heads.keys.clone(), heads.values.clone(), own);
                    attend_parts(decoder, heads, &[part(keys, values, filled), own], layer.get(Role::Sinks))
                })),
            })?;
            let delta = delta.iter().flat_map(DeltaStates::parts);
            let of_experts = routed.put(of_experts, of, routing.as_ref());
            Ok([&x].into_iter().chain(window.parts()).chain(delta).cloned().chain(of_experts).collect())
        });
        let carried = carried.map_err(program_error(name))?;
        let (carried, of_experts) = carried[1..].split_at(of_states);
        let (window, delta) = carried.split_at(cached.len());
        let (window, delta) = (Window::of(window), DeltaStates::of(delta));
        let flushed = flush(decoder, shape.columns, [&state.keys, &state.values], &base, &window);
        let [keys, values] = flushed.map_err(program_error(name))?;
        let last = counts.gt(&counts.like(0)).select(&behind, &state.last);
        let next = StateValues { keys, values, last, length: &state.length + &counts, delta, ..state };
        let of_experts = of_experts.iter().map(|record| ("routed_experts", record));
        decoder.split().finish(f, name, next.results().chain(of_experts))
    }

    /// Returns the columns of the cache, `[B, T, C]`, and the tokens of the extension, `[B, T, T]`, that a token attends to in layers with a
    /// sliding window.
    fn masks(self, f: &Builder, base: &Value, positions: &Value, window: Option<usize>) -> [Value; 2] {
        let Self { shape, columns_read, tokens, .. } = self;
        let held = shape.columns.positions(window, base, columns_read);
        let held = held.broadcast_in_dim(&[shape.slots, tokens, held.shape()[1]], &[0, 2]);
        let own = f.iota(2, TensorType::new(Dtype::I32, [shape.slots, tokens, tokens]));
        let of_rows = |rows: &Value, all: &Value| rows.broadcast_in_dim(all.shape(), &[0]);
        let of_tokens = |of: &Value, all: &Value| of.broadcast_in_dim(all.shape(), &[0, 1]);
        let own_positions = &own + of_rows(base, &own);
        let before = own_positions.le(&of_tokens(positions, &own));
        let Some(window) = window else { return [held.ge(&held.like(0)), before] };
        let first = (positions - positions.like(window as i64 - 1)).max(&positions.like(0));
        [held.ge(&of_tokens(&first, &held)), before & own_positions.ge(&of_tokens(&first, &own))]
    }
}
