//! The forward pass over rows of whole sequences.
//!
//! Legend: B rows, T tokens of a row, N tokens, V vocabulary, H hidden size, k experts of a token.

use super::experts::RouterCounts;
use super::layer_ops::scaled;
use super::traced::RESIDUAL;
use super::{
    Axis, ByWindow, Decoder, Heads, Layer, LayerCache, Layers, Mask, Matrix, ParameterValues, Role, Rotaries,
    RouterSums, Rows, layer_at, rows_at,
};
use crate::leaves::leaves;
use grpo_stablehlo::{Dtype, Result, Save, Value};

/// The inputs of all layers for rows of whole sequences.
struct WholeRows {
    rotaries: Rotaries,
    masks: ByWindow<Mask>,
    /// The positions `[B, T]`, i32, for a model with Gated DeltaNets.
    positions: Option<Value>,
    /// The tokens that count in the statistics of routers ([`Rows::counted`]).
    counted: Option<Value>,
    /// The recorded experts of the tokens ([`Rows::routed`]).
    routed: Option<Value>,
}

leaves!(WholeRows { rotaries, masks, positions, counted, routed });

/// The values that a loop over layers carries.
struct Carry {
    /// The residual stream `[B, T, H]`.
    x: Value,
    counts: Option<RouterCounts>,
}

leaves!(Carry { x, counts });

/// A layer's view of rows of whole sequences: no token is in a cache.
struct LayerOfRows<'a> {
    tokens: &'a WholeRows,
    /// The recorded experts of the layer, `[B, T, k]`.
    recorded: Option<Value>,
}

impl LayerCache for LayerOfRows<'_> {
    fn rotaries(&self) -> &Rotaries {
        &self.tokens.rotaries
    }

    fn recorded_experts(&self) -> Option<&Value> {
        self.recorded.as_ref()
    }

    fn attend(&mut self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads) -> Value {
        decoder.attend(heads, self.tokens.masks.of(layer.spec.sliding_window), layer.parameters.get(Role::Sinks))
    }

    fn gated_delta_net(&mut self, decoder: &Decoder, layer: &Layer<'_>, x: &Value) -> Result<Value> {
        decoder.delta_net(layer.parameters, x, self.tokens.positions.as_ref())
    }
}

impl Decoder {
    /// Returns the hidden states `[B, T, H]` after the final norm. `save` selects the activations of each layer that are saved for the
    /// backward pass.
    ///
    /// # Errors
    /// Weights or rows do not fit the configuration.
    pub fn hidden(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<Value> {
        Ok(self.final_norm(weights, &self.residual(weights, rows, save)?.0))
    }

    /// Returns the residual stream `[B, T, H]` after the last layer, before the final norm. Also returns the sums of the routers of experts
    /// if [`Rows::counted`] requests them.
    ///
    /// # Errors
    /// See [`Decoder::hidden`].
    pub fn residual(&self, weights: &ParameterValues, rows: &Rows, save: Save) -> Result<(Value, Option<RouterSums>)> {
        let tokens = WholeRows {
            rotaries: self.rotaries(&rows.distinct_positions()),
            masks: self.masks(rows),
            positions: self.config.linear_attention.map(|_| rows.positions.clone()),
            counted: rows.counted.clone(),
            routed: rows.routed.clone(),
        };
        let x = self.embed(weights, &rows.ids);
        let counts = rows.counted.as_ref().and_then(|counted| RouterCounts::new(self, counted, rows.routed.is_some()));
        let carry = Carry { x, counts };
        let carry = self.over_layers(weights, &carry, &tokens, Layers::Loop(save), |layer, carry: Carry, tokens| {
            let recorded = tokens.routed.as_ref().map(|routed| layer_at(routed, &layer.router()));
            let (x, _, routing) = self.block(layer, &carry.x, LayerOfRows { tokens: &tokens, recorded })?;
            let counts = match (carry.counts, routing, &tokens.counted) {
                (Some(counts), Some(routing), Some(counted)) => Some(counts.with(&routing, counted)),
                (counts, ..) => counts,
            };
            Ok(Carry { x, counts })
        })?;
        let sums = carry.counts.zip(rows.counted.as_ref());
        Ok((carry.x, sums.map(|(counts, counted)| RouterSums::new(&counts, counted, rows.routed.as_ref()))))
    }

    /// Returns the token embeddings `[B, T, H]` of token ids `[B, T]`.
    pub fn embed(&self, weights: &ParameterValues, ids: &Value) -> Value {
        let rows = rows_at(&weights[Role::EmbedTokens], ids);
        let rows = match self.config.pad_token_id {
            // The padding token's embedding is not trained.
            Some(pad) => {
                let is_padding = ids.eq(&ids.like(pad as i64)).broadcast_in_dim(rows.shape(), &[0, 1]);
                is_padding.select(&rows.stop_gradient(), &rows)
            }
            None => rows,
        };
        let rows = match self.config.embedding_multiplier {
            1.0 => rows,
            factor => scaled(rows.convert(Dtype::F32), factor),
        };
        let rows = rows.convert(self.compute.dtype());
        // If the columns of the embedding are sharded, a device first looks up its columns for all rows; devices then exchange them.
        let table = self.rules.sharding(&[Axis::Vocab, Axis::Embed]);
        let rows = match table.is_some_and(|table| !table.axes(1).is_empty()) {
            true => self.rules.constrain_from_the_last(&rows, &RESIDUAL),
            false => rows,
        };
        self.rules.constrain(&rows, &RESIDUAL)
    }

    /// Applies the final norm to `x` `[..., H]`, and divides by the divisor of logits.
    pub fn final_norm(&self, weights: &ParameterValues, x: &Value) -> Value {
        let hidden = self.norm(x, &weights[Role::Norm]);
        scaled(hidden, 1.0 / self.config.logits_scaling).convert(self.compute.dtype())
    }

    /// Returns the number of columns of logits: the size of the vocabulary, which may be padded.
    pub(crate) fn logit_columns(&self) -> usize {
        self.rules.padded_vocab(self.config.vocab_size)
    }

    /// Returns the columns of logits `[N, V]` that belong to the vocabulary.
    pub(crate) fn without_padding(&self, logits: &Value) -> Value {
        match self.config.vocab_size {
            vocab if vocab < logits.shape()[1] => logits.slice(&[0, 0], &[logits.shape()[0], vocab]),
            _ => logits.clone(),
        }
    }

    /// Returns the logits `[..., V]` in f32, with the model's softcap, of hidden states `[..., H]` after the final norm. If the vocabulary is
    /// padded, columns behind it are -inf, so that they have no probability.
    pub fn logits(&self, weights: &ParameterValues, hidden: &Value) -> Value {
        let logits = self.product(weights, hidden, weights.head_role(), Dtype::F32);
        let logits = self.adapted(weights, hidden, Matrix::LmHead, logits);
        let logits = match self.config.final_logit_softcapping {
            Some(cap) => (&logits * logits.like(1.0 / cap)).tanh() * logits.like(cap),
            None => logits,
        };
        let logits = match self.config.vocab_size {
            vocab if vocab < self.logit_columns() => {
                let columns = logits.builder().iota(logits.shape().len() - 1, logits.ty().with_dtype(Dtype::I32));
                columns.lt(&columns.like(vocab as i64)).select(&logits, &logits.like(f64::NEG_INFINITY))
            }
            _ => logits,
        };
        let [rows, columns] = [Axis::Batch, Axis::Vocab].map(Some);
        match hidden.shape().len() {
            2 => self.rules.constrain(&logits, &[rows, columns]),
            3 => self.rules.constrain(&logits, &[rows, None, columns]),
            _ => logits,
        }
    }
}
