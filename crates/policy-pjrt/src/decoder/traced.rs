//! The operations of a layer ([`LayerOps`]) as operations of a program.

use super::attention::Projected;
use super::layer_loop::Layer;
use super::layer_ops::{Broadcast, last_columns, scaled};
use super::{Axis, Decoder, Heads, Matrix, Role, Rotaries, Routing};
use grpo_decoder::{BlockSpec, LayerOps, Mlp, Norm, Projection, Residual, block};
use grpo_models::{Activation, Mixer};
use grpo_stablehlo::{Dtype, Error, Result, Unary, Value};

/// Logical axes of the residual stream `[B, T, H]`.
pub(super) const RESIDUAL: [Axis; 3] = [Axis::Batch, Axis::Length, Axis::Embed];

/// 2 sqrt(2/pi), of the tanh approximation of GELU.
const TWICE_ROOT: f64 = 1.595_769_121_605_730_8;

/// The inputs and outputs of a layer besides its parameters and the residual stream: for training the tokens of the rows, for rollouts a KV
/// cache and the states of Gated DeltaNets.
pub(crate) trait LayerCache {
    /// Returns the rotations of the tokens.
    fn rotaries(&self) -> &Rotaries;

    /// Returns the experts `[B, T, k]` that replace the choice of the layer's router, except for tokens with -1.
    fn recorded_experts(&self) -> Option<&Value> {
        None
    }

    /// Computes the outputs of the heads `[B, T, A D]`, f32.
    fn attend(&mut self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads) -> Value;

    /// Computes the gated outputs of a Gated DeltaNet `[B, T, Hv Dv]`, f32, of the layer's input `x` `[B, T, H]`.
    ///
    /// # Errors
    /// An operation cannot be built.
    fn gated_delta_net(&mut self, decoder: &Decoder, layer: &Layer<'_>, x: &Value) -> Result<Value>;
}

/// A layer of a program. Activations are `[B, T, ..]`: in the compute dtype if they are the residual stream or an input of matrix products,
/// else f32.
struct Traced<'a, C> {
    decoder: &'a Decoder,
    layer: &'a Layer<'a>,
    cache: C,
    routing: Option<Routing>,
}

impl Decoder {
    /// Computes one layer `x` `[B, T, H]` -> `[B, T, H]` ([`block`]). Also returns the cache after the layer, and the choice of the router if the
    /// MLP is a mixture of experts.
    ///
    /// # Errors
    /// An operation cannot be built.
    pub(crate) fn block<C: LayerCache>(
        &self,
        layer: &Layer<'_>,
        x: &Value,
        cache: C,
    ) -> Result<(Value, C, Option<Routing>)> {
        let x = self.rules.constrain(x, &RESIDUAL);
        let mut ops = Traced { decoder: self, layer, cache, routing: None };
        let x = block(&mut ops, &BlockSpec::new(&self.config, layer.spec), x)?;
        Ok((x, ops.cache, ops.routing))
    }

    /// Returns the activation of a gate.
    pub(super) fn activated(&self, gate: &Value) -> Value {
        let shares = match self.config.hidden_act {
            Activation::Silu => gate.unary(Unary::Logistic),
            // 0.5 (1 + tanh(u)) = sigmoid(2u)
            Activation::GeluTanh => {
                let slope = gate * gate * gate.like(0.044715) + gate.like(1.0);
                (gate * slope * gate.like(TWICE_ROOT)).unary(Unary::Logistic)
            }
        };
        gate * shares
    }
}

impl<C> Traced<'_, C> {
    /// Returns the normalised `x`, f32.
    fn normalised(&self, x: &Value, norm: Norm) -> Value {
        let name = self.decoder.config.norm_placement.names()[norm as usize];
        match name.and_then(Role::of_norm).and_then(|role| self.layer.parameters.get(role)) {
            Some(weight) => self.decoder.norm(x, weight),
            None => x.clone(),
        }
    }
}

impl<C: LayerCache> LayerOps for Traced<'_, C> {
    type Tensor = Value;
    type Heads = Projected;
    type Error = Error;

    fn branch(&mut self, x: Value, norm: Option<Norm>) -> Result<[Value; 2]> {
        let normed = norm.map(|norm| self.normalised(&x, norm).convert(self.decoder.compute.dtype()));
        Ok([normed.unwrap_or_else(|| x.clone()), x])
    }

    fn heads(&mut self, x: Value) -> Result<(Projected, Option<Value>)> {
        Ok(self.decoder.projected(self.layer, &x))
    }

    fn complete_values(&mut self, heads: Projected) -> Result<Projected> {
        Ok(self.decoder.with_values(heads))
    }

    fn norm_heads(&mut self, heads: Projected) -> Result<Projected> {
        Ok(self.decoder.with_norms(self.layer.parameters, heads))
    }

    fn rotate(&mut self, heads: Projected) -> Result<Projected> {
        Ok(match self.cache.rotaries().get(self.layer.spec.rope) {
            Some(rotary) => heads.rotated(rotary, self.decoder.compute.dtype()),
            None => heads,
        })
    }

    fn attention(&mut self, heads: Projected) -> Result<Value> {
        Ok(self.cache.attend(self.decoder, self.layer, &self.decoder.heads(heads)))
    }

    fn gate(&mut self, values: Value, gates: Value) -> Result<Value> {
        let mut factors = gates.unary(Unary::Logistic);
        if factors.shape() != values.shape() {
            let rows = &values.shape()[..values.shape().len() - 1];
            factors = factors.reshape(rows).along_first(&values);
        }
        Ok(values * factors)
    }

    fn gated_delta_net(&mut self, x: Value) -> Result<Value> {
        self.cache.gated_delta_net(self.decoder, self.layer, &x)
    }

    fn shared_gates(&mut self, x: Value) -> Result<Value> {
        Ok(self.decoder.linear(self.layer.parameters, &x, Matrix::SharedGate, None))
    }

    fn gated_mlp(&mut self, x: Value, mlp: Mlp) -> Result<Value> {
        let (decoder, layer) = (self.decoder, self.layer.parameters);
        let constrained =
            |columns: Value| decoder.rules.constrain(&columns, &[Some(Axis::Batch), None, Some(Axis::Mlp)]);
        let [gate, up] = match layer.get(Role::GateUpProj) {
            Some(_) => {
                let both = decoder.linear(layer, &x, Matrix::GateUpProj, None);
                let width = decoder.config.intermediate_size;
                [0, 1].map(|half| constrained(last_columns(&both, half * width..(half + 1) * width)))
            }
            None => {
                let matrices = match mlp {
                    Mlp::Dense => [Matrix::GateProj, Matrix::UpProj],
                    Mlp::SharedExpert => [Matrix::SharedGateProj, Matrix::SharedUpProj],
                };
                matrices.map(|matrix| constrained(decoder.linear(layer, &x, matrix, None)))
            }
        };
        Ok(decoder.activated(&gate) * up)
    }

    fn experts(&mut self, x: Value) -> Result<Value> {
        let recorded = self.cache.recorded_experts();
        let (update, routing) = self.decoder.experts(self.layer.parameters, &x, recorded)?;
        self.routing = Some(routing);
        Ok(update)
    }

    fn linear_add(&mut self, residual: Residual<Value>, x: Value, projection: Projection) -> Result<Value> {
        let (decoder, layer) = (self.decoder, self.layer.parameters);
        let of_heads = |x: &Value, axis| decoder.rules.constrain(x, &[Some(Axis::Batch), None, Some(axis)]);
        let update = match (projection, self.layer.spec.mixer) {
            (Projection::Mixer, Mixer::Attention) => {
                decoder.linear(layer, &of_heads(&x, Axis::Heads), Matrix::OProj, layer.get(Role::OBias))
            }
            (Projection::Mixer, Mixer::GatedDeltaNet) => {
                decoder.linear(layer, &of_heads(&x, Axis::LinearHeads), Matrix::OutProj, None)
            }
            (Projection::Mlp(Mlp::Dense), _) => decoder.linear(layer, &x, Matrix::DownProj, None),
            (Projection::Mlp(Mlp::SharedExpert), _) => decoder.linear(layer, &x, Matrix::SharedDownProj, None),
        };
        self.add(residual, update)
    }

    fn add(&mut self, residual: Residual<Value>, update: Value) -> Result<Value> {
        let update = residual.norm.map_or(update.clone(), |norm| self.normalised(&update, norm));
        let update = scaled(update, residual.factor);
        let sum = residual.stream.convert(Dtype::F32) + update;
        Ok(self.decoder.rules.constrain(&sum.convert(self.decoder.compute.dtype()), &RESIDUAL))
    }

    fn scale(&mut self, x: Value) -> Result<Value> {
        let wide = x.convert(Dtype::F32);
        let factor = self.layer.parameters[Role::LayerScalar].convert(Dtype::F32).reshape(&[]);
        Ok((&wide * factor.broadcast_in_dim(wide.shape(), &[])).convert(self.decoder.compute.dtype()))
    }
}
