//! One decoder layer.

use super::attention::Attention;
use super::autodiff_ops::{self, Sequences};
use super::build::Builder;
use super::layers::{Linear, RmsNorm};
use backend_cpu::layers::RopeTable;
use burn::module::Module;
use burn::tensor::Tensor;
use policy::Result;
use std::sync::Arc;

/// MLP of a layer, SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// Fused projection `[H, 2I]` to gate, then up.
    pub gate_up_proj: Linear,
    /// Output projection `[I, H]`.
    pub down_proj: Linear,
}

impl Mlp {
    fn new(of: &mut Builder<'_>, name: &str) -> Result<Self> {
        let (h, i) = (of.config.hidden_size, of.config.intermediate_size);
        Ok(Self {
            gate_up_proj: Linear::new(of, &format!("{name}.gate_up_proj"), [h, 2 * i], false)?,
            down_proj: Linear::new(of, &format!("{name}.down_proj"), [i, h], false)?,
        })
    }

    /// Returns `residual` plus the MLP of `x`, both `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, residual: Tensor<2>) -> Result<Tensor<2>> {
        let mixed = autodiff_ops::swiglu(self.gate_up_proj.forward(x)?)?;
        self.down_proj.add_to(residual, mixed)
    }
}

/// One decoder layer: attention and MLP, each on the normalised residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before attention.
    pub input_norm: RmsNorm,
    /// Attention.
    pub attn: Attention,
    /// Norm before the MLP.
    pub post_norm: RmsNorm,
    /// MLP.
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

    /// Applies the layer to `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, rope: &RopeTable, sequences: &Arc<Sequences>) -> Result<Tensor<2>> {
        let x = self.attn.forward(self.input_norm.forward(x.clone())?, x, rope, sequences)?;
        self.mlp.forward(self.post_norm.forward(x.clone())?, x)
    }
}
