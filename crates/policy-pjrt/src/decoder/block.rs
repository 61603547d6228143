//! One decoder layer.

use super::split::RESIDUAL;
use super::{Axis, Decoder, Matrix, ParameterValues, Role, Routing};
use models::Activation;
use stablehlo::{Dtype, Result, Unary, Value};

/// 2 sqrt(2/pi), of the tanh approximation of GELU.
const TWICE_ROOT: f64 = 1.595_769_121_605_730_8;

impl Decoder {
    /// Computes one layer `x` `[B, T, H]` -> `[B, T, H]`: a mixer of tokens and an MLP, whose outputs are added to the residual stream `x`; their
    /// inputs, outputs or both are normalised, and the sum may have a factor. `mix` computes the output of the mixer `[B, T, H]`, f32, from its
    /// normalised input: [`Decoder::attention`], for example. Also returns the choice of the router, if the MLP is a mixture of experts; `routed`
    /// `[B, T, k]`, i32, replaces it, except for tokens with -1.
    ///
    /// # Errors
    /// The error of `mix`, or an operation of the experts that cannot be built.
    pub fn block(
        &self,
        layer: &ParameterValues,
        x: &Value,
        routed: Option<&Value>,
        mix: impl FnOnce(&Value) -> Result<Value>,
    ) -> Result<(Value, Option<Routing>)> {
        let [before, after, before_mlp, after_mlp] = self.norm_roles();
        let x = &self.split.constrain(x, &RESIDUAL);
        let normed = self.normed(layer, x, before);
        let x = self.add(layer, x, mix(&normed)?, after);
        let normed = self.normed(layer, &x, before_mlp);
        let (update, routing) = match &self.config.experts {
            Some(experts) => {
                let (update, routing) = self.experts(layer, &normed, experts, routed)?;
                (update, Some(routing))
            }
            None => (self.mlp(layer, &normed), None),
        };
        let x = self.add(layer, &x, update, after_mlp);
        let x = match layer.get(Role::LayerScalar) {
            Some(factor) => {
                let wide = x.convert(Dtype::F32);
                let factor = factor.convert(Dtype::F32).reshape(&[]).broadcast_in_dim(wide.shape(), &[]);
                (wide * factor).convert(self.compute.dtype())
            }
            None => x,
        };
        Ok((x, routing))
    }

    /// Returns the norms before and after the mixer, and before and after the MLP, in the order of [`models::NormPlacement::names`].
    fn norm_roles(&self) -> [Option<Role>; 4] {
        self.config.norm_placement.names().map(|name| name.and_then(Role::of_norm))
    }

    /// Returns the normalised `x` in the compute dtype.
    fn normed(&self, layer: &ParameterValues, x: &Value, norm: Option<Role>) -> Value {
        match norm {
            Some(norm) => self.norm(x, &layer[norm]).convert(self.compute.dtype()),
            None => x.clone(),
        }
    }

    /// Computes the MLP (arXiv 2002.05202) in f32: `down(activation(gate(x)) * up(x))`, `x` `[..., H]` -> `[..., H]`.
    fn mlp(&self, layer: &ParameterValues, x: &Value) -> Value {
        let constrained = |columns: Value| self.split.constrain(&columns, &[Some(Axis::Batch), None, Some(Axis::Mlp)]);
        let [gate, up] = match layer.get(Role::GateUpProj) {
            Some(_) => {
                let both = self.linear(layer, x, Matrix::GateUpProj, None);
                let width = self.config.intermediate_size;
                [0, 1].map(|half| constrained(last_columns(&both, half * width..(half + 1) * width)))
            }
            None => [Matrix::GateProj, Matrix::UpProj].map(|matrix| constrained(self.linear(layer, x, matrix, None))),
        };
        self.linear(layer, &(self.activated(&gate) * up), Matrix::DownProj, None)
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

    /// Returns the residual stream `x` plus the normalised `update` (f32) times the multiplier.
    fn add(&self, layer: &ParameterValues, x: &Value, update: Value, norm: Option<Role>) -> Value {
        let update = norm.map_or(update.clone(), |norm| self.norm(&update, &layer[norm]));
        let update = scaled(update, self.config.residual_multiplier);
        self.split.constrain(&(x.convert(Dtype::F32) + update).convert(self.compute.dtype()), &RESIDUAL)
    }
}

/// Returns `x` times `factor`, without an operation if it is 1.
pub(super) fn scaled(x: Value, factor: f64) -> Value {
    if factor == 1.0 { x } else { &x * x.like(factor) }
}

/// Returns the given columns of the last dimension.
pub(super) fn last_columns(x: &Value, columns: std::ops::Range<usize>) -> Value {
    let (mut start, mut limit) = (vec![0; x.shape().len()], x.shape().to_vec());
    let last = limit.len() - 1;
    (start[last], limit[last]) = (columns.start, columns.end);
    x.slice(&start, &limit)
}
