//! OLMo 2 and OLMo 3.

use super::super::fields::Fields;
use super::super::rope_json;
use super::layer_types::{
    positive_window, set_layers_with_ropes, set_windows, sliding_layers, write_layers_with_ropes,
};
use super::table::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layer::NormPlacement;
use serde_json::Value;

const DEFAULTS: Defaults = Defaults { rms_norm_eps: 1e-5, pad_token_id: Some(1), ..Defaults::USUAL };

pub(super) const OLMO2: FamilyTable = FamilyTable {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    defaults: DEFAULTS,
    reads: &[],
    read: |fields, config| {
        read_norms(fields, config)?;
        let sliding = sliding_layers(fields, config, None, |_| false)?;
        set_windows(config, None, &sliding);
        Ok(())
    },
    write: write_bias,
};

pub(super) const OLMO3: FamilyTable = FamilyTable {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    defaults: Defaults { rope_theta: 500_000.0, ..DEFAULTS },
    reads: &[rope_json::BY_LAYER_TYPE],
    read: |fields, config| {
        read_norms(fields, config)?;
        let is_missing = !fields.keys().any(|key| key == "sliding_window");
        let window = if is_missing { Some(4096) } else { positive_window(fields)? };
        if window.is_none() && fields.get("layer_types").is_none() {
            let supported = "at least 1: the class has sliding layers without layer_types";
            return Err(fields.unsupported("sliding_window", supported));
        }
        let sliding = sliding_layers(fields, config, window, |layer| !(layer + 1).is_multiple_of(4))?;
        let local_theta = match rope_json::read_by_layer_type(fields, config)? {
            Some(theta) => theta,
            // The class does not take the base of full attention for sliding layers.
            None if fields.get("rope_parameters").is_some() && fields.get("rope_theta").is_none() => 500_000.0,
            // Version 4 of transformers uses `rope_theta` in sliding layers, and version 5 the default.
            None if config.rope_theta != 500_000.0 => {
                let supported = "500000, or rope_parameters by layer type: versions of transformers differ";
                return Err(fields.unsupported("rope_theta", supported));
            }
            None => config.rope_theta,
        };
        set_layers_with_ropes(config, window, &sliding, local_theta);
        Ok(())
    },
    write: |config, json| {
        write_bias(config, json);
        write_layers_with_ropes(config, json);
    },
};

fn read_norms(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    (config.norm_placement, config.qk_norm, config.qk_norm_over_heads) = (NormPlacement::After, true, true);
    read_attention_bias(fields, config)
}

fn write_bias(config: &ModelConfig, json: &mut Value) {
    json["attention_bias"] = config.attention_bias.into();
}
