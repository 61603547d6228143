//! Qwen3-MoE, such as Qwen3-30B-A3B.

use super::super::fields::Fields;
use super::experts_json::{READS, read_sizes, set_experts, write_sizes};
use super::layer_types::read_one_window;
use super::qwen::DEFAULTS;
use super::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::experts::Experts;
use serde_json::Value;

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
