//! The layers of the decoder: linear layer, RMSNorm, grouped-query attention with rotary position embeddings, MLP.

use super::autodiff_ops::{self, Addend, Sequences};
use super::build::Builder;
use super::lora::LowRank;
use super::weight::Weight;
use backend_cpu::layers::{Heads, RopeTable};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use policy::Result;
use std::sync::Arc;

/// A linear layer, `y = x W + b`.
#[derive(Module, Debug)]
pub struct Linear {
    /// Weight W `[in, out]`.
    pub weight: Weight,
    /// Bias b `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Adapters of the matrices that are fused in this layer.
    pub adapters: Vec<LowRank>,
}

impl Linear {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, shape: [usize; 2], bias: bool) -> Result<Self> {
        let weight = of.weight(&format!("{name}.weight"), shape)?;
        let bias = if bias { Some(of.parameter(&format!("{name}.bias"), [shape[1]])?) } else { None };
        Ok(Self { weight, bias, adapters: Vec::new() })
    }

    /// Applies the layer to `x: [N, in]` -> `[N, out]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let add = self.bias.as_ref().map_or(Addend::Nothing, |bias| Addend::Bias(bias.val()));
        self.run(x, add)
    }

    /// Returns `residual` plus the layer applied to `x: [N, in]`, both `[N, out]`; for layers without a bias.
    pub(crate) fn add_to(&self, residual: Tensor<2>, x: Tensor<2>) -> Result<Tensor<2>> {
        self.run(x, Addend::Residual(residual))
    }

    fn run(&self, x: Tensor<2>, add: Addend) -> Result<Tensor<2>> {
        let y = autodiff_ops::linear(x.clone(), &self.weight, add)?;
        self.adapters.iter().try_fold(y, |y, adapter| adapter.forward(x.clone(), y))
    }

    /// Returns the weight `[in, out]` with merged adapters.
    pub(crate) fn merged(&self) -> Result<Vec<f32>> {
        let mut weight = self.weight.to_vec()?;
        self.adapters.iter().try_for_each(|adapter| adapter.merge_into(&mut weight, self.weight.dims()[1]))?;
        Ok(weight)
    }
}

/// Root mean square normalisation, `y = x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Factor `[H]` of each channel.
    pub weight: Param<Tensor<1>>,
    /// Term added to the mean square.
    pub(super) eps: f64,
}

impl RmsNorm {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, size: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: of.parameter(&format!("{name}.weight"), [size])?, eps })
    }

    /// Normalises `x: [N, H]` -> `[N, H]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        autodiff_ops::rms_norm(x, self.weight.val(), self.eps)
    }
}

/// Causal grouped-query attention (arXiv 2305.13245); each of K key/value heads serves R = A / K query heads.
#[derive(Module, Debug)]
pub struct Attention {
    /// Fused projection `[H, (A + 2K) D]` to query heads, then key heads, then value heads.
    pub qkv_proj: Linear,
    /// Output projection `[A D, H]`.
    pub o_proj: Linear,
    /// Norm `[D]` of query heads before the rotary embedding, if the model has QK norm.
    pub q_norm: Option<RmsNorm>,
    /// Norm `[D]` of key heads before the rotary embedding, if the model has QK norm.
    pub k_norm: Option<RmsNorm>,
    /// A, K and D.
    #[module(skip)]
    heads: Heads,
}

impl Attention {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str) -> Result<Self> {
        let config = of.config;
        let (h, d) = (config.hidden_size, config.head_dim());
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let qkv = [h, (heads + 2 * kv_heads) * d];
        let qkv_proj = Linear::new(of, &format!("{name}.qkv_proj"), qkv, config.attention_bias)?;
        let o_proj = Linear::new(of, &format!("{name}.o_proj"), [heads * d, h], false)?;
        let (mut q_norm, mut k_norm) = (None, None);
        if config.qk_norm {
            q_norm = Some(RmsNorm::new(of, &format!("{name}.q_norm"), d, config.rms_norm_eps)?);
            k_norm = Some(RmsNorm::new(of, &format!("{name}.k_norm"), d, config.rms_norm_eps)?);
        }
        let heads = Heads { query: heads, key_value: kv_heads, width: d };
        Ok(Self { qkv_proj, o_proj, q_norm, k_norm, heads })
    }

    /// Returns `residual` plus the attention of `x`, both `[N, H]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        residual: Tensor<2>,
        rope: &RopeTable,
        sequences: &Arc<Sequences>,
    ) -> Result<Tensor<2>> {
        let mut qkv = self.qkv_proj.forward(x)?;
        if let (Some(query), Some(key)) = (&self.q_norm, &self.k_norm) {
            qkv = autodiff_ops::norm_heads(qkv, self.heads, query.weight.val(), key.weight.val(), query.eps)?;
        }
        let mixed = autodiff_ops::attention(qkv, self.heads, rope, sequences)?;
        self.o_proj.add_to(residual, mixed)
    }
}

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
    /// Returns the linear layers with their names.
    pub(super) fn linears(&mut self) -> [(&'static str, &mut Linear); 4] {
        let Self { attn, mlp, .. } = self;
        [
            ("attn.qkv_proj", &mut attn.qkv_proj),
            ("attn.o_proj", &mut attn.o_proj),
            ("mlp.gate_up_proj", &mut mlp.gate_up_proj),
            ("mlp.down_proj", &mut mlp.down_proj),
        ]
    }

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
