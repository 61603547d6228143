//! Grouped-query attention (arXiv 2305.13245) with rotary position embeddings.

use super::autodiff_ops::{self, Sequences};
use super::build::Builder;
use super::layers::{Linear, RmsNorm};
use backend_cpu::layers::{Heads, RopeTable};
use burn::module::Module;
use burn::tensor::Tensor;
use policy::Result;
use std::sync::Arc;

/// Causal self-attention; each of K key/value heads serves R = A / K query heads.
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
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
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
        Ok(Self { qkv_proj, o_proj, q_norm, k_norm, num_heads: heads, num_kv_heads: kv_heads, head_dim: d })
    }

    /// Returns A, K and D.
    pub(crate) fn heads(&self) -> Heads {
        Heads { query: self.num_heads, key_value: self.num_kv_heads, width: self.head_dim }
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
            qkv = autodiff_ops::norm_heads(qkv, self.heads(), query.weight.val(), key.weight.val(), query.eps())?;
        }
        let mixed = autodiff_ops::attention(qkv, self.heads(), rope, sequences)?;
        self.o_proj.add_to(residual, mixed)
    }
}
