//! Gemma 3, whose larger models are wrapped in a model of images and text.

use super::super::fields::Fields;
use super::super::rope_json;
use super::layer_types::{positive_window, set_layers_with_ropes, sliding_layers, write_layers_with_ropes};
use super::table::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layer::{Activation, NormPlacement};
use serde_json::Value;

pub(crate) const TABLE: FamilyTable = FamilyTable {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    defaults: Defaults {
        // The files of 4B name two of them.
        sizes: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
        ],
        max_position_embeddings: 131_072,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        rope_theta: 1e6,
        tie_word_embeddings: true,
        pad_token_id: Some(0),
        ..Defaults::USUAL
    },
    // The class does not read `hidden_act`.
    reads: &["hidden_act", "hidden_activation", rope_json::BY_LAYER_TYPE],
    read,
    write,
};

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    read_attention_bias(fields, config)?;
    let activation = fields.text("hidden_activation")?.unwrap_or(Activation::GeluTanh.name());
    if activation != Activation::GeluTanh.name() {
        return Err(fields.unsupported("hidden_activation", Activation::GeluTanh.name()));
    }
    (config.hidden_act, config.norm_placement) = (Activation::GeluTanh, NormPlacement::Both);
    (config.qk_norm, config.zero_centered_norms) = (true, true);
    config.embedding_multiplier = (config.hidden_size as f64).sqrt();
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_multiplier = Some(scalar.powf(-0.5));

    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = if is_missing { Some(4096) } else { positive_window(fields)? };
    if window.is_none() && fields.get("layer_types").is_none() {
        let supported = "at least 1: the class has sliding layers without layer_types";
        return Err(fields.unsupported("sliding_window", supported));
    }
    let pattern = fields.count("sliding_window_pattern")?.unwrap_or(6);
    if pattern == 0 {
        return Err(fields.unsupported("sliding_window_pattern", "at least 1"));
    }
    let sliding = sliding_layers(fields, config, window, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let local_theta = match rope_json::read_by_layer_type(fields, config)? {
        Some(theta) => theta,
        None => fields.number("rope_local_base_freq")?.unwrap_or(10_000.0),
    };
    set_layers_with_ropes(config, window, &sliding, local_theta);
    Ok(())
}

fn write(config: &ModelConfig, json: &mut Value) {
    if let Value::Object(json) = json {
        json.remove("hidden_act");
    }
    json["hidden_activation"] = config.hidden_act.name().into();
    json["attention_bias"] = config.attention_bias.into();
    // The field is a whole number.
    let scale = config.attention_multiplier.unwrap_or((config.head_dim() as f64).powf(-0.5));
    json["query_pre_attn_scalar"] = (scale.powi(-2).round() as u64).into();
    write_layers_with_ropes(config, json);
}
