//! One decoder layer.

use super::split::RESIDUAL;
use super::{Axis, Decoder, Heads, Matrix, ParameterValues, Role, Rotary};
use stablehlo::{Dtype, Unary, Value};

impl Decoder {
    /// Computes one layer: attention and MLP, each on the normalised residual stream `x` `[B, T, H]` -> `[B, T, H]`. `attend` computes the
    /// attention output `[B, T, A D]`, f32, from the queries, keys and values of these tokens.
    pub fn block(
        &self,
        layer: &ParameterValues,
        x: &Value,
        rotary: &Rotary,
        attend: impl FnOnce(&Heads) -> Value,
    ) -> Value {
        let x = &self.split.constrain(x, &RESIDUAL);
        let normed = self.norm(x, &layer[Role::InputLayernorm]).convert(self.compute.dtype());
        let mixed = attend(&self.heads(layer, &normed, rotary));
        let mixed = self.split.constrain(&mixed, &[Some(Axis::Batch), None, Some(Axis::Heads)]);
        let x = self.add(x, &self.linear(layer, &mixed, Matrix::OProj, None));
        let normed = self.norm(&x, &layer[Role::PostAttentionLayernorm]).convert(self.compute.dtype());
        self.add(&x, &self.mlp(layer, &normed))
    }

    /// Computes SwiGLU (arXiv 2002.05202) in f32: `down(silu(gate(x)) * up(x))`, `x` `[..., H]` -> `[..., H]`.
    fn mlp(&self, layer: &ParameterValues, x: &Value) -> Value {
        let [gate, up] = [Matrix::GateProj, Matrix::UpProj].map(|matrix| {
            let columns = self.linear(layer, x, matrix, None);
            self.split.constrain(&columns, &[Some(Axis::Batch), None, Some(Axis::Mlp)])
        });
        self.linear(layer, &(&gate * gate.unary(Unary::Logistic) * up), Matrix::DownProj, None)
    }

    /// Returns the residual stream `x` plus `update` (f32).
    fn add(&self, x: &Value, update: &Value) -> Value {
        self.split.constrain(&(x.convert(Dtype::F32) + update).convert(self.compute.dtype()), &RESIDUAL)
    }
}
