//! SmolLM3: Llama without rotary embeddings in some layers (NoPE).

use super::super::fields::Fields;
use super::layer_types::{set_windows, sliding_layers};
use super::table::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layer::{LayerRope, LayerSpec};
use serde_json::Value;

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    defaults: Defaults {
        max_position_embeddings: 32768,
        num_key_value_heads: Some(4),
        rope_theta: 2e6,
        tie_word_embeddings: true,
        pad_token_id: Some(128_004),
        ..Defaults::USUAL
    },
    reads: &["no_rope_layers", "no_rope_layer_interval"],
    read: |fields, config| {
        read_attention_bias(fields, config)?;
        if fields.flag("use_sliding_window")? == Some(true) {
            return Err(fields.unsupported("use_sliding_window", "false: full attention in every layer"));
        }
        let sliding = sliding_layers(fields, config, None, |_| false)?;
        set_windows(config, None, &sliding);
        let layer = |has_rope| LayerSpec {
            rope: if has_rope { LayerRope::Global } else { LayerRope::None },
            ..LayerSpec::default()
        };
        config.layers = ModelConfig::shortest(layers_with_rope(fields, config)?.into_iter().map(layer).collect());
        Ok(())
    },
    write: |config, json| {
        let has_rope = |index| u8::from(config.layer(index).rope != LayerRope::None);
        json["attention_bias"] = config.attention_bias.into();
        json["mlp_bias"] = false.into();
        json["use_sliding_window"] = false.into();
        json["no_rope_layers"] = (0..config.num_hidden_layers).map(has_rope).collect();
    },
};

/// Returns `true` for each layer with a rotary embedding. Despite its name, `no_rope_layers` has 1 for these layers.
fn layers_with_rope(fields: &Fields, config: &ModelConfig) -> Result<Vec<bool>> {
    let count = config.num_hidden_layers;
    let Some(list) = fields.typed("no_rope_layers", "a list of 0 and 1", Value::as_array)? else {
        let interval = fields.count("no_rope_layer_interval")?.unwrap_or(4);
        if interval == 0 {
            return Err(fields.unsupported("no_rope_layer_interval", "at least 1"));
        }
        return Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let has_rope = |value: &Value| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => value.as_bool(),
    };
    let layers: Option<Vec<bool>> = list.iter().take(count).map(has_rope).collect();
    let expected = || fields.unsupported("no_rope_layers", format!("0 or 1 for each of the {count} layers"));
    layers.filter(|layers| layers.len() == count).ok_or_else(expected)
}
