//! The loop over layers of a rollout: prefill, decode step and extension compute the same layers ([`grpo_decoder::block`]), each with a
//! [`KvCache`] of its own.
//!
//! Legend: L layers of a cache, B rows, T tokens of a row, W columns of the window, K key/value heads, D head dimension, R layers with
//! experts, k experts of a token.

use super::window::Window;
use crate::decoder::{
    Decoder, DeltaStates, Heads, Layer, LayerCache, Layers, NextTokens, ParameterValues, Rotaries, put_layer, zeros,
};
use crate::leaves::{Leaves, leaves};
use grpo_models::ModelConfig;
use grpo_stablehlo::{Builder, Dtype, Result, Value};

/// The values that a loop over layers carries.
#[derive(Clone)]
pub(super) struct Carry {
    /// The residual stream `[B, T, H]`.
    pub(super) x: Value,
    /// Keys and values of the tokens of the call.
    pub(super) window: Window,
    /// The states of Gated DeltaNets, if the model has them.
    pub(super) delta: Option<DeltaStates>,
    /// The experts of the tokens in the layers with experts, `[R, B, T, k]`, i32, if they are recorded.
    pub(super) routed: Option<Value>,
}

leaves!(Carry { x, window, delta, routed });

/// The inputs of the layers of a rollout program: rotations, masks, and keys and values of earlier tokens.
pub(super) trait KvCache: Leaves {
    /// Returns the rotations of the tokens.
    fn rotaries(&self) -> &Rotaries;

    /// Returns the positions and numbers of the tokens, for a model with Gated DeltaNets.
    fn next_tokens(&self) -> Option<NextTokens>;

    /// Writes keys and values of the tokens of a layer into the window, and computes the outputs of the heads `[B, T, A D]`, f32.
    fn attend(&self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads, window: &mut Window) -> Value;
}

/// The cache of a layer, and the values that the layer changes.
struct LayerOfCall<'a, K> {
    cache: &'a K,
    window: Window,
    delta: Option<DeltaStates>,
}

impl<K: KvCache> LayerCache for LayerOfCall<'_, K> {
    fn rotaries(&self) -> &Rotaries {
        self.cache.rotaries()
    }

    fn attend(&mut self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads) -> Value {
        self.cache.attend(decoder, layer, heads, &mut self.window)
    }

    fn gated_delta_net(&mut self, decoder: &Decoder, layer: &Layer<'_>, x: &Value) -> Result<Value> {
        decoder.continue_delta_net(layer, x, self.cache.next_tokens(), &mut self.delta)
    }
}

impl Carry {
    /// Runs all layers.
    ///
    /// # Errors
    /// An operation cannot be built.
    pub(super) fn over_layers<K: KvCache>(
        &self,
        decoder: &Decoder,
        weights: &ParameterValues,
        cache: &K,
        layers: Layers,
    ) -> Result<Self> {
        decoder.over_layers(weights, self, cache, layers, |layer, carry: Self, cache: K| {
            let own = LayerOfCall { cache: &cache, window: carry.window, delta: carry.delta };
            let (x, LayerOfCall { window, delta, .. }, routing) = decoder.block(layer, &carry.x, own)?;
            let routed = carry.routed.map(|record| match routing {
                Some(routing) => put_layer(&record, &layer.router(), &routing.ids(record.shape()[3])),
                None => record,
            });
            Ok(Self { x, window, delta, routed })
        })
    }
}

/// Returns the empty record `[R, B, T, k]`, i32, of the experts of rows `[B, T]`; none for a model without experts.
pub(super) fn empty_record(f: &Builder, config: &ModelConfig, [rows, tokens]: [usize; 2]) -> Option<Value> {
    let top = config.experts.as_ref()?.num_experts_per_tok;
    Some(zeros(f, Dtype::I32, &[config.routers(), rows, tokens, top]))
}
