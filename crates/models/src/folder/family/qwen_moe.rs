//! Qwen2-MoE, such as Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B, and Qwen3-MoE, such as Qwen3-30B-A3B.

use super::super::fields::Fields;
use super::experts_json::{READS, read_sizes, set_experts, write_sizes};
use super::layer_types::{positive_window, read_one_window, set_windows, sliding_layers};
use super::qwen::{DEFAULTS, write_windows};
use super::table::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::experts::{Experts, SharedExpert};
use serde_json::Value;

pub(super) const QWEN2_MOE: FamilyTable = FamilyTable {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    defaults: Defaults { num_key_value_heads: Some(16), ..DEFAULTS },
    reads: READS,
    read: read_qwen2,
    write: |config, json| {
        json["qkv_bias"] = config.attention_bias.into();
        write_windows(config, json);
        write_experts(config, json);
        let shared = config.experts.as_ref().and_then(|experts| experts.shared_expert).unwrap_or_default();
        json["shared_expert_intermediate_size"] = shared.intermediate_size.into();
    },
};

pub(super) const QWEN3_MOE: FamilyTable = FamilyTable {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    defaults: Defaults { num_key_value_heads: Some(4), ..DEFAULTS },
    reads: READS,
    read: read_qwen3,
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        let window = config.layer(0).sliding_window;
        json["use_sliding_window"] = window.is_some().into();
        json["sliding_window"] = window.into();
        write_experts(config, json);
    },
};

fn read_qwen2(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.attention_bias = fields.flag("qkv_bias")?.unwrap_or(true);
    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = match fields.flag("use_sliding_window")? {
        Some(true) if is_missing => Some(4096),
        Some(true) => positive_window(fields)?,
        _ => None,
    };
    // In contrast to Qwen2, every other layer below `max_window_layers` has the window.
    let end = fields.count("max_window_layers")?.unwrap_or(28);
    let sliding = sliding_layers(fields, config, window, |layer| layer < end && layer.is_multiple_of(2))?;
    set_windows(config, window, &sliding);
    let intermediate_size = fields.count("shared_expert_intermediate_size")?.unwrap_or(5632);
    let shared_expert = Some(SharedExpert { intermediate_size, is_gated: true });
    let defaults =
        Experts { num_experts: 60, num_experts_per_tok: 4, moe_intermediate_size: 1408, ..Experts::default() };
    read_experts(fields, config, Experts { shared_expert, ..defaults })
}

fn read_qwen3(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.qk_norm = true;
    read_attention_bias(fields, config)?;
    // A window is in all layers, if there is one.
    if fields.flag("use_sliding_window")? == Some(true) {
        read_one_window(fields, config, Some(4096))?;
    }
    let defaults =
        Experts { num_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 768, ..Experts::default() };
    read_experts(fields, config, defaults)
}

/// Reads the experts, and the layers that have one MLP instead: layers in `mlp_only_layers`, and layers whose number, from 1 on, is not a multiple
/// of `decoder_sparse_step`. `defaults` has the values of missing fields.
fn read_experts(fields: &Fields, config: &mut ModelConfig, defaults: Experts) -> Result<()> {
    let step = match fields.count("decoder_sparse_step")? {
        Some(0) => return Err(fields.unsupported("decoder_sparse_step", "at least 1")),
        step => step.unwrap_or(1),
    };
    let integers = |value: &Value| value.as_array()?.iter().map(Value::as_i64).collect::<Option<Vec<_>>>();
    let only_mlp = fields.typed("mlp_only_layers", "a list of whole numbers", integers)?.unwrap_or_default();
    let experts = Experts {
        moe_intermediate_size: fields.count("moe_intermediate_size")?.unwrap_or(defaults.moe_intermediate_size),
        norm_topk_prob: fields.flag("norm_topk_prob")?.unwrap_or(false),
        ..read_sizes(fields, defaults)?
    };
    let is_dense = |layer: usize| !(layer + 1).is_multiple_of(step) || only_mlp.contains(&(layer as i64));
    set_experts(config, experts, is_dense);
    Ok(())
}

/// Writes the fields of [`read_experts`].
fn write_experts(config: &ModelConfig, json: &mut Value) {
    let layers = 0..config.num_hidden_layers;
    let dense: Vec<usize> = layers.filter(|layer| config.experts_of(*layer).is_none()).collect();
    json["decoder_sparse_step"] = 1.into();
    json["mlp_only_layers"] = dense.into();
    write_sizes(config, "num_experts", json);
    let Some(experts) = &config.experts else { return };
    json["moe_intermediate_size"] = experts.moe_intermediate_size.into();
    json["norm_topk_prob"] = experts.norm_topk_prob.into();
}
