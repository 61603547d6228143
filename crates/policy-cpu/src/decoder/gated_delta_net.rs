//! The Gated DeltaNet of a layer.

use super::autodiff_ops::{self, Sequences};
use super::build::Builder;
use super::layers::Linear;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use grpo_backend_cpu::layers::DeltaHeads;
use grpo_models::LinearAttention;
use grpo_policy::Result;
use std::sync::Arc;

/// Gated DeltaNet (arXiv 2412.06464): a recurrent state per value head instead of keys and values.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
    /// Fused projection `[H, C + Hv Dv + 2 Hv]` to the channels of the convolution (queries, keys, values), gates, strengths, decays.
    pub in_proj: Linear,
    /// Causal depthwise convolution `[C, L]`.
    pub conv: Param<Tensor<2>>,
    /// Logarithms of the decays' factors `[Hv]`.
    pub a_log: Param<Tensor<1>>,
    /// Bias `[Hv]` of the decays.
    pub dt_bias: Param<Tensor<1>>,
    /// Norm `[Dv]` of the outputs of value heads.
    pub norm: Param<Tensor<1>>,
    /// Output projection `[Hv Dv, H]`.
    pub out_proj: Linear,
    #[module(skip)]
    heads: DeltaHeads,
    /// Term added to the mean square of outputs.
    eps: f64,
}

/// Returns the sizes as an argument of the kernels.
pub(crate) fn delta_heads(of: LinearAttention) -> DeltaHeads {
    DeltaHeads {
        key: of.linear_num_key_heads,
        value: of.linear_num_value_heads,
        key_width: of.linear_key_head_dim,
        value_width: of.linear_value_head_dim,
        taps: of.linear_conv_kernel_dim,
    }
}

impl GatedDeltaNet {
    pub(crate) fn new(of: &mut Builder<'_>, name: &str, sizes: LinearAttention) -> Result<Self> {
        let (h, eps, heads) = (of.config.hidden_size, of.config.rms_norm_eps, delta_heads(sizes));
        Ok(Self {
            in_proj: Linear::new(of, &format!("{name}.in_proj"), [h, heads.row()], false)?,
            conv: of.parameter(&format!("{name}.conv"), [heads.channels(), heads.taps])?,
            a_log: of.parameter(&format!("{name}.a_log"), [heads.value])?,
            dt_bias: of.parameter(&format!("{name}.dt_bias"), [heads.value])?,
            norm: of.parameter(&format!("{name}.norm"), [heads.value_width])?,
            out_proj: Linear::new(of, &format!("{name}.out_proj"), [heads.values(), h], false)?,
            heads,
            eps,
        })
    }

    pub(super) fn heads(&self) -> DeltaHeads {
        self.heads
    }

    pub(super) fn eps(&self) -> f64 {
        self.eps
    }

    /// Returns the gated outputs `[N, Hv Dv]` of `x` `[N, H]` before the output projection.
    pub(crate) fn forward(&self, x: Tensor<2>, sequences: &Arc<Sequences>) -> Result<Tensor<2>> {
        let vectors = [self.a_log.val(), self.dt_bias.val(), self.norm.val()];
        autodiff_ops::gated_delta_net(
            self.in_proj.forward(x)?,
            self.conv.val(),
            vectors,
            self.heads,
            self.eps,
            sequences,
        )
    }
}
