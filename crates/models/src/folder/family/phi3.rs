//! Phi-3 and Phi-4: fused projections, partly rotated heads, LongRoPE.

use super::super::rope_json;
use super::layer_types::{read_one_window, write_one_window};
use super::table::{Defaults, FamilyTable};
use crate::config::RopeType;

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    defaults: Defaults {
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        pad_token_id: Some(32000),
        ..Defaults::USUAL
    },
    reads: &["partial_rotary_factor"],
    read: |fields, config| {
        config.fused_projections = true;
        if config.rope_scaling.as_ref().is_some_and(|scaling| scaling.rope_type != RopeType::Longrope) {
            let key = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
            return Err(fields.unsupported(key, "a rope_type of default or longrope"));
        }
        let key = "original_max_position_embeddings";
        if let (None, Some(rope)) = (fields.get(key), rope_json::object(fields)?)
            && rope.count(key)?.is_some_and(|inner| inner != 4096)
        {
            let supported = "4096, or the same field beside rope_scaling, which the class takes instead";
            return Err(rope.unsupported(key, supported));
        }
        read_one_window(fields, config, None)
    },
    write: |config, json| {
        json["partial_rotary_factor"] = config.partial_rotary_factor.into();
        json["original_max_position_embeddings"] = config.max_position_embeddings.into();
        write_one_window(config, json);
    },
};
