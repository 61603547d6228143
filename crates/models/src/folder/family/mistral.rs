//! Mistral 7B, Mistral Nemo and Ministral 3.

use super::super::rope_json;
use super::layer_types::{read_one_window, write_one_window};
use super::table::{Defaults, FamilyTable};
use crate::config::{RopeScaling, RopeType};

pub(crate) const MISTRAL: FamilyTable = FamilyTable {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    defaults: Defaults { max_position_embeddings: 4096 * 32, num_key_value_heads: Some(8), ..Defaults::USUAL },
    reads: &[],
    read: |fields, config| read_one_window(fields, config, Some(4096)),
    write: write_one_window,
};

pub(crate) const MINISTRAL3: FamilyTable = FamilyTable {
    model_type: "ministral3",
    architecture: "Ministral3ForCausalLM",
    defaults: Defaults {
        max_position_embeddings: 262_144,
        num_key_value_heads: Some(8),
        head_dim: Some(128),
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        pad_token_id: Some(11),
        ..Defaults::USUAL
    },
    reads: &[],
    read: |fields, config| {
        match (rope_json::object(fields)?, &mut config.rope_scaling) {
            (Some(rope), Some(scaling)) if scaling.rope_type == RopeType::Yarn => {
                let beta = rope.number("llama_4_scaling_beta")?;
                let beta = rope.required("llama_4_scaling_beta", beta, "a number; 0 for queries that do not grow")?;
                scaling.llama_4_scaling_beta = Some(beta);
            }
            (Some(rope), _) => return Err(rope.unsupported("rope_type", "yarn: scaled rotary frequencies")),
            (None, _) if config.rope_theta != 1e6 => {
                let supported = "1000000 without rope_parameters: the class ignores the field";
                return Err(fields.unsupported("rope_theta", supported));
            }
            // The rotary embedding of the class.
            (None, scaling) => {
                *scaling = Some(RopeScaling {
                    rope_type: RopeType::Yarn,
                    factor: 16.0,
                    original_max_position_embeddings: 16384,
                    llama_4_scaling_beta: Some(0.1),
                    ..RopeScaling::default()
                });
            }
        }
        read_one_window(fields, config, None)
    },
    write: write_one_window,
};
