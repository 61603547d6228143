//! Qwen2, Qwen2.5 and Qwen3, and the text decoders of Qwen2.5-VL and Qwen3-VL.

use super::super::fields::Fields;
use super::super::rope_json;
use super::layer_types::{positive_window, set_windows, sliding_layers};
use super::table::{Defaults, FamilyTable, read_attention_bias};
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
        read_windows(fields, config, 28)
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
        read_attention_bias(fields, config)?;
        read_windows(fields, config, 28)
    },
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        write_windows(config, json);
    },
};

/// The text decoder of Qwen2.5-VL: Qwen2 with three positions per token, which are equal in text.
pub(crate) const QWEN2_5_VL: FamilyTable = FamilyTable {
    model_type: "qwen2_5_vl_text",
    architecture: "Qwen2_5_VLForConditionalGeneration",
    defaults: Defaults {
        sizes: &[
            ("vocab_size", 152_064),
            ("hidden_size", 8192),
            ("intermediate_size", 29568),
            ("num_hidden_layers", 80),
            ("num_attention_heads", 64),
        ],
        num_key_value_heads: Some(8),
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        ..DEFAULTS
    },
    reads: &[rope_json::MROPE],
    read: |fields, config| {
        config.attention_bias = true;
        read_windows(fields, config, 80)
    },
    write: write_windows,
};

/// The text decoder of Qwen3-VL: Qwen3 with three positions per token, which are equal in text.
pub(crate) const QWEN3_VL: FamilyTable = FamilyTable {
    model_type: "qwen3_vl_text",
    architecture: "Qwen3VLForConditionalGeneration",
    defaults: Defaults {
        sizes: &[
            ("vocab_size", 151_936),
            ("hidden_size", 4096),
            ("intermediate_size", 22016),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
        ],
        max_position_embeddings: 128_000,
        head_dim: Some(128),
        rope_theta: 500_000.0,
        ..DEFAULTS
    },
    reads: &[rope_json::MROPE],
    read: |fields, config| {
        config.qk_norm = true;
        read_attention_bias(fields, config)?;
        // The class has no sliding window.
        if fields.flag("use_sliding_window")? == Some(true) {
            return Err(fields.unsupported("use_sliding_window", "false: full attention in every layer"));
        }
        let sliding = sliding_layers(fields, config, None, |_| false)?;
        set_windows(config, None, &sliding);
        Ok(())
    },
    write: QWEN3.write,
};

/// Layers from `max_window_layers` on, or else from `first` on, have a window, if `use_sliding_window` is true.
fn read_windows(fields: &Fields, config: &mut ModelConfig, first: usize) -> Result<()> {
    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = match fields.flag("use_sliding_window")? {
        Some(true) if is_missing => Some(4096),
        Some(true) => positive_window(fields)?,
        _ => None,
    };
    let first = fields.count("max_window_layers")?.unwrap_or(first);
    let sliding = sliding_layers(fields, config, window, |layer| layer >= first)?;
    set_windows(config, window, &sliding);
    Ok(())
}

pub(super) fn write_windows(config: &ModelConfig, json: &mut Value) {
    let windows = || (0..config.num_hidden_layers).map(|index| config.layer(index).sliding_window);
    let window = windows().flatten().next();
    json["use_sliding_window"] = window.is_some().into();
    if let Some(window) = window {
        json["sliding_window"] = window.into();
        let name = |window: Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
        json["layer_types"] = windows().map(name).collect();
    }
}
