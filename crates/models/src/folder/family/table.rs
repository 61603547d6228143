//! The form of a family's table.

use super::super::fields::Fields;
use crate::config::ModelConfig;
use crate::error::Result;
use serde_json::Value;

/// The reading and writing of a family's `config.json`. Fields that all families have are read by [`ConfigJson`](super::super::config_json::ConfigJson).
pub(crate) struct FamilyTable {
    pub(crate) model_type: &'static str,
    pub(crate) architecture: &'static str,
    pub(crate) defaults: Defaults,
    /// Fields that other families refuse, and this one reads.
    pub(crate) reads: &'static [&'static str],
    /// Adds the family's own fields to a configuration with the common ones.
    pub(crate) read: fn(&Fields, &mut ModelConfig) -> Result<()>,
    /// Adds the family's own fields to a `config.json` with the common ones.
    pub(crate) write: fn(&ModelConfig, &mut Value),
}

/// The values of missing fields, as in the family's class of `transformers`.
pub(crate) struct Defaults {
    /// The sizes that files may leave to the class, by field.
    pub(crate) sizes: &'static [(&'static str, usize)],
    pub(crate) max_position_embeddings: usize,
    /// `None` is `num_attention_heads`.
    pub(crate) num_key_value_heads: Option<usize>,
    /// `None` is `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) rms_norm_eps: f64,
    pub(crate) rope_theta: f64,
    pub(crate) partial_rotary_factor: f64,
    pub(crate) tie_word_embeddings: bool,
    pub(crate) pad_token_id: Option<usize>,
}

impl Defaults {
    /// The values of most classes.
    pub(crate) const USUAL: Self = Self {
        sizes: &[],
        max_position_embeddings: 2048,
        num_key_value_heads: None,
        head_dim: None,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        partial_rotary_factor: 1.0,
        tie_word_embeddings: false,
        pad_token_id: None,
    };
}

/// Reads `attention_bias`: biases of q_proj, k_proj, v_proj and o_proj. Qwen2 has biases without the field, and none in o_proj.
pub(super) fn read_attention_bias(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.attention_output_bias = config.attention_bias;
    Ok(())
}

/// Refuses `attention_bias: true`.
pub(super) fn without_attention_bias(fields: &Fields, family: &str) -> Result<()> {
    if fields.flag("attention_bias")? == Some(true) {
        let supported = format!("false: biases of q_proj, k_proj, v_proj and o_proj are not computed for {family}");
        return Err(fields.unsupported("attention_bias", supported));
    }
    Ok(())
}
