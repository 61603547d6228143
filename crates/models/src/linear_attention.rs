//! Linear attention: the sizes and tensors of a Gated DeltaNet.

use crate::error::{Result, check};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The sizes of layers with a Gated DeltaNet (arXiv 2412.06464), with the field names of `config.json` of Qwen3.5.
///
/// A head has a state S `[Dk, Dv]`, which is zero before the first token of a sequence. A token with query q, key k, value v, strength
/// `beta` and logarithm of the decay `g` changes it and reads it:
///
/// ```text
/// q, k, v = silu(causal depthwise convolution of in_proj_qkv(x) over the last L tokens)
/// q, k    = q / sqrt(|q|^2 + 1e-6) / sqrt(Dk), k / sqrt(|k|^2 + 1e-6)       each key head serves Hv / Hk consecutive value heads
/// beta    = sigmoid(in_proj_b(x))
/// g       = -exp(A_log) softplus(in_proj_a(x) + dt_bias)
/// S       = exp(g) S
/// S       = S + k (beta (v - S^T k))^T
/// o       = S^T q
/// y       = out_proj(weight * o / sqrt(mean(o^2) + rms_norm_eps) * silu(in_proj_z(x)))
/// ```
///
/// Legend: Hk key heads, Hv value heads, Dk and Dv their widths, L the size of the convolution, C = 2 Hk Dk + Hv Dv its channels (queries,
/// then keys, then values).
///
/// ```
/// use grpo_models::{Family, LayerSpec, LinearAttention, ModelConfig};
///
/// let config = ModelConfig {
///     layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
///     linear_attention: Some(LinearAttention { linear_key_head_dim: 8, linear_value_head_dim: 8, ..Default::default() }),
///     attention_output_gate: true,
///     attention_bias: false,
///     qk_norm: true,
///     zero_centered_norms: true,
///     ..Default::default()
/// };
/// config.validate()?;
/// assert_eq!(Family::of(&config)?, Family::Qwen3_5);
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinearAttention {
    /// Hk, the number of key heads, and of query heads.
    #[default(2)]
    pub linear_num_key_heads: usize,
    /// Hv, the number of value heads, a multiple of `linear_num_key_heads`.
    #[default(4)]
    pub linear_num_value_heads: usize,
    /// Dk, the width of a query and of a key.
    #[default(16)]
    pub linear_key_head_dim: usize,
    /// Dv, the width of a value.
    #[default(16)]
    pub linear_value_head_dim: usize,
    /// L, the number of tokens that the convolution reads: a token and the tokens before it.
    #[default(4)]
    pub linear_conv_kernel_dim: usize,
}

impl LinearAttention {
    /// Returns C, the number of channels of the convolution: queries, then keys, then values.
    pub fn conv_channels(&self) -> usize {
        2 * self.linear_num_key_heads * self.linear_key_head_dim + self.values()
    }

    /// Returns Hv Dv, the number of columns of all values.
    pub fn values(&self) -> usize {
        self.linear_num_value_heads * self.linear_value_head_dim
    }

    /// Returns Hv Dk Dv, the number of values of the state of a sequence.
    pub fn state(&self) -> usize {
        self.values() * self.linear_key_head_dim
    }

    pub(crate) fn validate(&self) -> Result<()> {
        for (key, value, limit) in [
            ("model.linear_attention.linear_num_key_heads", self.linear_num_key_heads, 1 << 10),
            ("model.linear_attention.linear_num_value_heads", self.linear_num_value_heads, 1 << 10),
            ("model.linear_attention.linear_key_head_dim", self.linear_key_head_dim, 1 << 10),
            ("model.linear_attention.linear_value_head_dim", self.linear_value_head_dim, 1 << 10),
            ("model.linear_attention.linear_conv_kernel_dim", self.linear_conv_kernel_dim, 1 << 4),
        ] {
            check((1..=limit).contains(&value), key, &format!("between 1 and {limit}"), value)?;
        }
        let (keys, values) = (self.linear_num_key_heads, self.linear_num_value_heads);
        check(
            values.is_multiple_of(keys),
            "model.linear_attention.linear_num_value_heads",
            "a multiple of linear_num_key_heads",
            format!("{values} for {keys} key heads"),
        )
    }
}
