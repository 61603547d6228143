//! Programs for prompts whose first tokens are in the KV cache of a slot: `resume` begins new samples there, and `extend` adds the keys and values
//! of the next tokens of the prompts, and computes the states of Gated DeltaNets after them.
//!
//! Legend: L layers of a cache, B slots, T tokens of an extension, S columns of a cache, C columns of it that are read, K key/value heads, D head
//! dimension.

use super::cache::{CachedLayers, flush};
use super::decode::columns_of;
use super::layers::{Carry, KvCache, empty_record};
use super::parts::{Part, attend_parts};
use super::prefill::Begun;
use super::state::{Shape, SlotRows, StateValues};
use super::window::{CACHE, Window};
use crate::decoder::{
    Broadcast, ByWindow, Decoder, Heads, Layer, Layers, NextTokens, Role, Rotaries, put_layer, zeros,
};
use crate::error::Result;
use crate::leaves::leaves;
use crate::modules::program_error;
use grpo_stablehlo::{Builder, Dtype, Module, Save, TensorType, Value};

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
    let rows = Begun::arguments(&f, shape).rows(&state.rows);
    decoder.axis_rules().finish(f, "rollout_resume", StateValues { rows, ..state }.results())
}

/// The inputs of the layers of an extension.
struct ExtensionCache {
    rotaries: Rotaries,
    cached: Window,
    tokens: Option<NextTokens>,
    /// The columns of the cache, `[B, T, C]`, and the tokens of the extension, `[B, T, T]`, that a token attends to.
    masks: ByWindow<[Value; 2]>,
    extend: Extend,
}

leaves!(ExtensionCache { rotaries, cached, tokens, masks }, copied: extend);

impl KvCache for ExtensionCache {
    fn rotaries(&self) -> &Rotaries {
        &self.rotaries
    }

    fn next_tokens(&self) -> Option<NextTokens> {
        self.tokens.clone()
    }

    fn attend(&self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads, window: &mut Window) -> Value {
        let Extend { shape, columns_read, .. } = self.extend;
        let cache = CachedLayers::index(decoder.config(), layer.spec);
        let columns = shape.columns.of(layer.spec.sliding_window).min(columns_read);
        let [filled, own] = self.masks.of(layer.spec.sliding_window);
        for (all, part) in [(&mut window.keys[cache], &heads.keys), (&mut window.values[cache], &heads.values)] {
            *all = put_layer(all, layer.number, part);
        }
        let part =
            |keys: Value, values: Value, seen: &Value| Part { keys, transposed: false, values, seen: seen.clone() };
        let [keys, values] = [&self.cached.keys[cache], &self.cached.values[cache]]
            .map(|cached| columns_of(cached, layer.number, columns));
        let own = part(heads.keys.clone(), heads.values.clone(), own);
        attend_parts(decoder, heads, &[part(keys, values, filled), own], layer.parameters.get(Role::Sinks))
    }
}

impl Extend {
    /// Builds the program. Arguments: weights; state; the tokens to process (`[B, T]`, i32, padded; the first one of a sequence is the last token of
    /// the state); their number (`[B]`, i32; 0 leaves a sequence unchanged); the token after them (`[B]`, i32). Result: the state and,
    /// with `routed_experts`, the experts of the tokens, `[L, B, T, k]`, i32.
    pub(super) fn module(self, decoder: &Decoder, weights: Dtype) -> Result<Module> {
        let Self { shape, tokens, routed_experts, .. } = self;
        let (f, name) = (Builder::new(), "rollout_extend");
        let weights = decoder.declare(&f, weights);
        let state = shape.arguments(&f, decoder);
        let ids = f.argument("ids", TensorType::new(Dtype::I32, [shape.slots, tokens]));
        let counts = f.argument("counts", TensorType::new(Dtype::I32, [shape.slots]));
        let behind = f.argument("behind", TensorType::new(Dtype::I32, [shape.slots]));

        let StateValues { rows, caches } = state;
        let base = &rows.length - rows.length.like(1);
        let index = f.iota(1, ids.ty().clone());
        let positions = &index + base.along_first(&index);
        let rotaries = decoder.rotaries(&positions);
        let x = decoder.embed(&weights, &ids);
        let masks = ByWindow::new(decoder, |window| self.masks(&f, &base, &positions, window));
        let next_tokens = rows.delta.as_ref().map(|_| NextTokens { positions, counts: counts.clone() });
        let cache = ExtensionCache { rotaries, cached: caches.clone(), tokens: next_tokens, masks, extend: self };
        let empty = |layers: &CachedLayers| {
            let ty = layers.ty(decoder.compute(), shape.slots, tokens);
            decoder.axis_rules().constrain(&zeros(&f, ty.dtype, &ty.shape), &CACHE)
        };
        let window: Vec<Value> = CachedLayers::of(decoder.config()).iter().map(empty).collect();
        let window = Window { keys: window.clone(), values: window };
        let routed = routed_experts.then(|| empty_record(&f, decoder.config(), [shape.slots, tokens])).flatten();
        let carry = Carry { x, window, delta: rows.delta.clone(), routed };
        let carried = carry.over_layers(decoder, &weights, &cache, Layers::Loop(Save::Carry));
        let Carry { window, delta, routed, .. } = carried.map_err(program_error(name))?;
        let caches = flush(decoder, shape.columns, &caches, &base, &window).map_err(program_error(name))?;
        let last = counts.gt(&counts.like(0)).select(&behind, &rows.last);
        let rows = SlotRows { last, length: &rows.length + &counts, delta, ..rows };
        let next = StateValues { rows, caches };
        let routed = routed.iter().map(|record| ("routed_experts", record));
        decoder.axis_rules().finish(f.clone(), name, next.results().chain(routed))
    }

    /// Returns the columns of the cache, `[B, T, C]`, and the tokens of the extension, `[B, T, T]`, that a token attends to in layers with a
    /// sliding window.
    fn masks(self, f: &Builder, base: &Value, positions: &Value, window: Option<usize>) -> [Value; 2] {
        let Self { shape, columns_read, tokens, .. } = self;
        let held = shape.columns.positions(window, base, columns_read);
        let held = held.broadcast_in_dim(&[shape.slots, tokens, held.shape()[1]], &[0, 2]);
        let own = f.iota(2, TensorType::new(Dtype::I32, [shape.slots, tokens, tokens]));
        let own_positions = &own + base.along_first(&own);
        let before = own_positions.le(&positions.along_first(&own));
        let Some(window) = window else { return [held.ge(&held.like(0)), before] };
        let first = (positions - positions.like(window as i64 - 1)).max(&positions.like(0));
        [held.ge(&first.along_first(&held)), before & own_positions.ge(&first.along_first(&own))]
    }
}
