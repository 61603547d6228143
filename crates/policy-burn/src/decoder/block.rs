//! One layer of the decoder.

use super::attention::Attention;
use super::layers::{Linear, RmsNorm};
use super::ops::{self, Addend, Sequences};
use backend_cpu::layers::RopeTable;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use models::ModelConfig;
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
    fn new(config: &ModelConfig, seed: u64, name: &str, device: &Device) -> Self {
        let (h, i, std) = (config.hidden_size, config.intermediate_size, config.initializer_range);
        let residual_std = std / (2.0 * config.num_hidden_layers as f64).sqrt();
        Self {
            gate_up_proj: Linear::new([h, 2 * i], false, std, seed, &format!("{name}.gate_up_proj"), device),
            down_proj: Linear::new([i, h], false, residual_std, seed, &format!("{name}.down_proj"), device),
        }
    }

    /// `residual` plus the MLP of `x`, both `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, residual: Tensor<2>) -> Result<Tensor<2>> {
        let mixed = ops::swiglu(self.gate_up_proj.forward(x)?)?;
        ops::linear(mixed, self.down_proj.weight.val(), Addend::Residual(residual))
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
    pub(crate) fn new(config: &ModelConfig, seed: u64, name: &str, device: &Device) -> Self {
        let norm = || RmsNorm::new(config.hidden_size, config.rms_norm_eps, device);
        Self {
            input_norm: norm(),
            attn: Attention::new(config, seed, &format!("{name}.attn"), device),
            post_norm: norm(),
            mlp: Mlp::new(config, seed, &format!("{name}.mlp"), device),
        }
    }

    /// The layer applied to `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>, rope: &RopeTable, sequences: &Arc<Sequences>) -> Result<Tensor<2>> {
        let x = self.attn.forward(self.input_norm.forward(x.clone())?, x, rope, sequences)?;
        self.mlp.forward(self.post_norm.forward(x.clone())?, x)
    }
}
