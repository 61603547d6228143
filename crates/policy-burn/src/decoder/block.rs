//! One layer of the decoder.

use super::attention::Attention;
use super::build::Builder;
use super::layers::{Linear, RmsNorm};
use super::ops::{self, Sequences};
use backend_cpu::layers::RopeTable;
use burn::module::Module;
use burn::tensor::Tensor;
use policy::Result;
use std::sync::Arc;

/// The MLP of a layer, SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The projection `[H, 2I]` to gate, then up: one product instead of two.
    pub gate_up_proj: Linear,
    /// The projection `[I, H]` back to the residual stream.
    pub down_proj: Linear,
}

impl Mlp {
    fn new(of: &mut Builder<'_>, name: &str) -> Result<Self> {
        let config = of.config;
        let (h, i, std) = (config.hidden_size, config.intermediate_size, config.initializer_range);
        let residual_std = std / (2.0 * config.num_hidden_layers as f64).sqrt();
        Ok(Self {
            gate_up_proj: Linear::new(of, &format!("{name}.gate_up_proj"), [h, 2 * i], false, std)?,
            down_proj: Linear::new(of, &format!("{name}.down_proj"), [i, h], false, residual_std)?,
        })
    }

    /// `residual` plus the MLP of `x`, both `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, residual: Tensor<2>) -> Result<Tensor<2>> {
        let mixed = ops::swiglu(self.gate_up_proj.forward(x)?)?;
        self.down_proj.add_to(residual, mixed)
    }
}

/// One layer of the decoder: attention and MLP, each on the normalised residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// The norm before attention.
    pub input_norm: RmsNorm,
    /// The attention.
    pub attn: Attention,
    /// The norm before the MLP.
    pub post_norm: RmsNorm,
    /// The MLP.
    pub mlp: Mlp,
}

impl Block {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str) -> Result<Self> {
        let (h, eps) = (of.config.hidden_size, of.config.rms_norm_eps);
        Ok(Self {
            input_norm: RmsNorm::new(of, &format!("{name}.input_norm"), h, eps)?,
            attn: Attention::new(of, &format!("{name}.attn"))?,
            post_norm: RmsNorm::new(of, &format!("{name}.post_norm"), h, eps)?,
            mlp: Mlp::new(of, &format!("{name}.mlp"))?,
        })
    }

    /// The layer applied to `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, rope: &RopeTable, sequences: &Arc<Sequences>) -> Result<Tensor<2>> {
        let x = self.attn.forward(self.input_norm.forward(x.clone())?, x, rope, sequences)?;
        self.mlp.forward(self.post_norm.forward(x.clone())?, x)
    }
}
