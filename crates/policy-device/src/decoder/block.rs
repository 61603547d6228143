//! One layer of the decoder.

use super::split::RESIDUAL;
use super::{Axis, Decoder, Heads, Matrix, ParameterValues, Role, Rotary};
use stablehlo::{Dtype, Unary, Value};

impl Decoder {
    /// One layer: attention and MLP, each on the normalised residual stream `x` `[B, T, H]` -> `[B, T, H]`. `attend` makes the
    /// attention `[B, T, A D]`, f32, of the queries, keys and values of these tokens, and of whatever else it knows.
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
        let mixed = self.split.constrain(&mixed, &[Axis::Batch, Axis::Length, Axis::Heads]);
        let x = self.add(x, &self.linear(layer, &mixed, Matrix::OProj, None));
        let normed = self.norm(&x, &layer[Role::PostAttentionLayernorm]).convert(self.compute.dtype());
        self.add(&x, &self.mlp(layer, &normed))
    }

    /// SwiGLU (arXiv 2002.05202) in f32: `down(silu(gate(x)) * up(x))`, `x` `[..., H]` -> `[..., H]`.
    fn mlp(&self, layer: &ParameterValues, x: &Value) -> Value {
        let [gate, up] = [Matrix::GateProj, Matrix::UpProj].map(|matrix| {
            let columns = self.linear(layer, x, matrix, None);
            self.split.constrain(&columns, &[Axis::Batch, Axis::Length, Axis::Mlp])
        });
        self.linear(layer, &(&gate * gate.unary(Unary::Logistic) * up), Matrix::DownProj, None)
    }

    /// The residual stream with `update`, f32, added to it.
    fn add(&self, x: &Value, update: &Value) -> Value {
        self.split.constrain(&(x.convert(Dtype::F32) + update).convert(self.compute.dtype()), &RESIDUAL)
    }
}
