//! Qwen2, Qwen2.5 and Qwen3.

use super::super::fields::Fields;
use super::layer_types::{positive_window, set_windows, sliding_layers};
use super::{Defaults, Family, FamilyTable, without_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use serde_json::Value;

pub(super) const DEFAULTS: Defaults =
    Defaults { max_position_embeddings: 32768, num_key_value_heads: Some(32), ..Defaults::USUAL };

pub(super) const QWEN2: FamilyTable = FamilyTable {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    defaults: DEFAULTS,
    reads: &[],
    read: |fields, config| {
        // The class always has these biases.
        config.attention_bias = true;
        read_windows(fields, config)
    },
    write: write_windows,
};

pub(super) const QWEN3: FamilyTable = FamilyTable {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    defaults: Defaults { head_dim: Some(128), ..DEFAULTS },
    reads: &[],
    read: |fields, config| {
        config.qk_norm = true;
        without_attention_bias(fields, Family::Qwen3)?;
        read_windows(fields, config)
    },
    write: |config, json| {
        json["attention_bias"] = false.into();
        write_windows(config, json);
    },
};

/// Layers from `max_window_layers` on have a window, if `use_sliding_window` is true.
fn read_windows(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = match fields.flag("use_sliding_window")? {
        Some(true) if is_missing => Some(4096),
        Some(true) => positive_window(fields)?,
        _ => None,
    };
    let first = fields.count("max_window_layers")?.unwrap_or(28);
    let sliding = sliding_layers(fields, config, window, |layer| layer >= first)?;
    set_windows(config, window, &sliding);
    Ok(())
}

fn write_windows(config: &ModelConfig, json: &mut Value) {
    let windows = || (0..config.num_hidden_layers).map(|index| config.layer(index).sliding_window);
    let window = windows().flatten().next();
    json["use_sliding_window"] = window.is_some().into();
    if let Some(window) = window {
        json["sliding_window"] = window.into();
        let name = |window: Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
        json["layer_types"] = windows().map(name).collect();
    }
}
