//! The operations of a layer ([`LayerOps`]) as burn operations that record their derivatives.

use super::autodiff_ops::{self, Sequences};
use super::experts::ExpertsMlp;
use super::gated_delta_net::GatedDeltaNet;
use super::host;
use super::layers::{Attention, Block, DenseMlp, Mixer, Mlp, RmsNorm};
use super::rope::RopeTables;
use super::routers::Routers;
use super::values::with_values;
use burn::module::Param;
use burn::tensor::Tensor;
use grpo_decoder::{LayerOps, Norm, Projection, Residual, block};
use grpo_policy::{Error, Result};
use std::sync::Arc;

/// A layer in a forward pass over packed sequences. Tensors are `[N, ..]`, f32.
struct Tape<'a> {
    block: &'a Block,
    ropes: &'a RopeTables,
    sequences: &'a Arc<Sequences>,
    routers: &'a mut Routers,
}

impl Block {
    /// Applies the layer to `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        ropes: &RopeTables,
        sequences: &Arc<Sequences>,
        routers: &mut Routers,
    ) -> Result<Tensor<2>> {
        block(&mut Tape { block: self, ropes, sequences, routers }, &self.spec, x)
    }
}

/// Returns the error of an operation that the layer does not have.
pub(super) fn no_such_part<T>(expected: &'static str) -> Result<T> {
    Err(Error::argument("a layer of the decoder", expected, "another one"))
}

impl<'a> Tape<'a> {
    fn norm(&self, norm: Norm) -> &'a Option<RmsNorm> {
        let Block { input_norm, attn_output_norm, post_norm, mlp_output_norm, .. } = self.block;
        match norm {
            Norm::BeforeMixer => input_norm,
            Norm::AfterMixer => attn_output_norm,
            Norm::BeforeMlp => post_norm,
            Norm::AfterMlp => mlp_output_norm,
        }
    }

    fn attention_part(&self) -> Result<&'a Attention> {
        match &self.block.attn {
            Mixer::Attention(attention) => Ok(attention),
            Mixer::GatedDeltaNet(_) => no_such_part("attention"),
        }
    }

    fn delta_net(&self) -> Result<&'a GatedDeltaNet> {
        match &self.block.attn {
            Mixer::GatedDeltaNet(net) => Ok(net),
            Mixer::Attention(_) => no_such_part("a Gated DeltaNet"),
        }
    }

    fn gated_part(&self, mlp: grpo_decoder::Mlp) -> Result<&'a DenseMlp> {
        match (&self.block.mlp, mlp) {
            (Mlp::Dense(mlp), grpo_decoder::Mlp::Dense) => Ok(mlp),
            (Mlp::Experts(ExpertsMlp { shared: Some(shared), .. }), grpo_decoder::Mlp::SharedExpert) => Ok(shared),
            _ => no_such_part("a dense MLP or a shared expert"),
        }
    }

    fn experts_mlp(&self) -> Result<&'a ExpertsMlp> {
        match &self.block.mlp {
            Mlp::Experts(mlp) => Ok(mlp),
            Mlp::Dense(_) => no_such_part("a mixture of experts"),
        }
    }
}

impl LayerOps for Tape<'_> {
    type Tensor = Tensor<2>;
    type Heads = Tensor<2>;
    type Error = Error;

    fn branch(&mut self, x: Tensor<2>, norm: Option<Norm>) -> Result<[Tensor<2>; 2]> {
        match norm.and_then(|norm| self.norm(norm).as_ref()) {
            Some(norm) => norm.forward_with_residual(x),
            None => autodiff_ops::fork(x),
        }
    }

    fn heads(&mut self, x: Tensor<2>) -> Result<(Tensor<2>, Option<Tensor<2>>)> {
        let attention = self.attention_part()?;
        let qkv = attention.qkv_proj.forward(x)?;
        if !attention.has_gates {
            return Ok((qkv, None));
        }
        let (qkv, gates) = autodiff_ops::split_gates(qkv, attention.heads)?;
        Ok((qkv, Some(gates)))
    }

    fn complete_values(&mut self, qkv: Tensor<2>) -> Result<Tensor<2>> {
        match self.attention_part()?.values {
            Some(values) => with_values(qkv, values),
            None => Ok(qkv),
        }
    }

    fn norm_heads(&mut self, qkv: Tensor<2>) -> Result<Tensor<2>> {
        let attention = self.attention_part()?;
        let (Some(query), Some(key)) = (&attention.q_norm, &attention.k_norm) else { return Ok(qkv) };
        let weights = [query.weight.val(), key.weight.val()];
        autodiff_ops::norm_heads(qkv, attention.heads, weights, query.offset as f32, query.eps)
    }

    /// Rotation is a part of [`LayerOps::attention`], which saves only the rotated rows.
    fn rotate(&mut self, qkv: Tensor<2>) -> Result<Tensor<2>> {
        Ok(qkv)
    }

    fn attention(&mut self, qkv: Tensor<2>) -> Result<Tensor<2>> {
        let Attention { heads, scores, sinks, spec, .. } = self.attention_part()?;
        let sinks = sinks.as_ref().map(Param::val);
        autodiff_ops::attention(qkv, *heads, *scores, self.ropes.get(spec.rope), sinks, self.sequences)
    }

    fn gate(&mut self, values: Tensor<2>, gates: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::gated_values(values, gates)
    }

    fn gated_delta_net(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        self.delta_net()?.forward(x, self.sequences)
    }

    fn gated_mlp(&mut self, x: Tensor<2>, mlp: grpo_decoder::Mlp) -> Result<Tensor<2>> {
        let DenseMlp { gate_up_proj, activation, .. } = self.gated_part(mlp)?;
        autodiff_ops::gated(gate_up_proj.forward(x)?, *activation)
    }

    fn shared_gates(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        match &self.experts_mlp()?.shared_gate {
            Some(gate) => gate.forward(x),
            None => no_such_part("a gate of the shared expert"),
        }
    }

    fn experts(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        self.experts_mlp()?.forward(x, self.routers)
    }

    fn linear_add(&mut self, residual: Residual<Tensor<2>>, x: Tensor<2>, projection: Projection) -> Result<Tensor<2>> {
        let [_, (_, output)] = self.block.attn.linears();
        let project = match projection {
            Projection::Mixer => output,
            Projection::Mlp(mlp) => &self.gated_part(mlp)?.down_proj,
        };
        if residual.norm.is_none() && project.bias.is_none() {
            // The projection is linear.
            return project.add_to(residual.stream, autodiff_ops::scaled(x, residual.factor as f32)?);
        }
        let update = project.forward(x)?;
        self.add(residual, update)
    }

    fn add(&mut self, residual: Residual<Tensor<2>>, update: Tensor<2>) -> Result<Tensor<2>> {
        let update = match residual.norm.and_then(|norm| self.norm(norm).as_ref()) {
            Some(norm) => norm.forward(update)?,
            None => update,
        };
        autodiff_ops::add_scaled(residual.stream, update, residual.factor as f32)
    }

    fn scale(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        let Some(factor) = &self.block.layer_scalar else { return Ok(x) };
        let factor = host::storage(factor.val())?;
        autodiff_ops::scaled(x, host::read(&factor)?[0])
    }
}
