//! Qwen3.5 without experts, which files wrap in a model of images and text: three layers with a Gated DeltaNet, then a layer with attention.

use super::super::fields::Fields;
use super::super::rope_json;
use super::table::{Defaults, FamilyTable, without_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layer::{LayerSpec, Mixer};
use crate::linear_attention::LinearAttention;
use serde_json::Value;

pub(crate) const TABLE: FamilyTable = FamilyTable {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    defaults: Defaults {
        sizes: &[
            ("vocab_size", 248_320),
            ("hidden_size", 4096),
            ("intermediate_size", 12288),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 16),
        ],
        max_position_embeddings: 32768,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        partial_rotary_factor: 0.25,
        ..Defaults::USUAL
    },
    reads: &["partial_rotary_factor", rope_json::MROPE],
    read,
    write,
};

/// The names of layers in `layer_types`.
const RECURRENT: &str = "linear_attention";
const FULL: &str = "full_attention";

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    without_attention_bias(fields, TABLE.model_type)?;
    // Files have the field, and the class always computes the gate.
    if fields.flag("attn_output_gate")? == Some(false) {
        return Err(fields.unsupported("attn_output_gate", "true: attention with output gates"));
    }
    (config.attention_output_gate, config.qk_norm, config.zero_centered_norms) = (true, true, true);
    let layers = layers(fields, config.num_hidden_layers)?;
    if layers.contains(&LayerSpec::GATED_DELTA_NET) {
        let size = |key, default| Ok::<_, crate::Error>(fields.count(key)?.unwrap_or(default));
        config.linear_attention = Some(LinearAttention {
            linear_num_key_heads: size("linear_num_key_heads", 16)?,
            linear_num_value_heads: size("linear_num_value_heads", 32)?,
            linear_key_head_dim: size("linear_key_head_dim", 128)?,
            linear_value_head_dim: size("linear_value_head_dim", 128)?,
            linear_conv_kernel_dim: size("linear_conv_kernel_dim", 4)?,
        });
    }
    config.layers = ModelConfig::shortest(layers);
    Ok(())
}

/// Reads the layers from `layer_types`, or from `full_attention_interval` if it is missing.
fn layers(fields: &Fields, count: usize) -> Result<Vec<LayerSpec>> {
    let Some(types) = fields.typed("layer_types", "a list of texts", Value::as_array)? else {
        let interval = fields.count("full_attention_interval")?.unwrap_or(4);
        if interval == 0 {
            return Err(fields.unsupported("full_attention_interval", "at least 1"));
        }
        let is_full = |layer: usize| layer.is_multiple_of(interval);
        let layer = |is_full| if is_full { LayerSpec::default() } else { LayerSpec::GATED_DELTA_NET };
        return Ok((1..=count).map(|number| layer(is_full(number))).collect());
    };
    let layer = |kind: &Value| match kind.as_str() {
        Some(RECURRENT) => Some(LayerSpec::GATED_DELTA_NET),
        Some(FULL) => Some(LayerSpec::default()),
        _ => None,
    };
    let layers: Option<Vec<LayerSpec>> = types.iter().map(layer).collect();
    layers.filter(|layers| layers.len() == count).ok_or_else(|| {
        fields.unsupported("layer_types", format!("{RECURRENT} or {FULL} for each of the {count} layers"))
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    json["attention_bias"] = false.into();
    json["attn_output_gate"] = true.into();
    json["partial_rotary_factor"] = config.partial_rotary_factor.into();
    let name = |layer: LayerSpec| if layer.mixer == Mixer::GatedDeltaNet { RECURRENT } else { FULL };
    json["layer_types"] = (0..config.num_hidden_layers).map(|index| name(config.layer(index))).collect();
    let Some(sizes) = config.linear_attention else { return };
    json["linear_num_key_heads"] = sizes.linear_num_key_heads.into();
    json["linear_num_value_heads"] = sizes.linear_num_value_heads.into();
    json["linear_key_head_dim"] = sizes.linear_key_head_dim.into();
    json["linear_value_head_dim"] = sizes.linear_value_head_dim.into();
    json["linear_conv_kernel_dim"] = sizes.linear_conv_kernel_dim.into();
}
