//! Qwen3-MoE, such as Qwen3-30B-A3B.

use super::super::fields::Fields;
use super::experts_json::{READS, read_sizes, write_sizes};
use super::layer_types::read_one_window;
use super::qwen::DEFAULTS;
use super::{Defaults, FamilyTable, read_attention_bias};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::experts::Experts;
use serde_json::{Value, json};

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    defaults: Defaults { num_key_value_heads: Some(4), ..DEFAULTS },
    reads: READS,
    read,
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        let window = config.layer(0).sliding_window;
        json["use_sliding_window"] = window.is_some().into();
        json["sliding_window"] = window.into();
        write_sizes(config, "num_experts", json);
        let Some(experts) = &config.experts else { return };
        json["moe_intermediate_size"] = experts.moe_intermediate_size.into();
        json["norm_topk_prob"] = experts.norm_topk_prob.into();
        json["decoder_sparse_step"] = 1.into();
        json["mlp_only_layers"] = json!([]);
    },
};

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.qk_norm = true;
    read_attention_bias(fields, config)?;
    if fields.count("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(fields.unsupported("decoder_sparse_step", "1: experts in every layer"));
    }
    if fields.typed("mlp_only_layers", "a list", Value::as_array)?.is_some_and(|layers| !layers.is_empty()) {
        return Err(fields.unsupported("mlp_only_layers", "[]: experts in every layer"));
    }
    let defaults = Experts { num_experts: 128, num_experts_per_tok: 8, ..Experts::default() };
    config.experts = Some(Experts {
        moe_intermediate_size: fields.count("moe_intermediate_size")?.unwrap_or(768),
        norm_topk_prob: fields.flag("norm_topk_prob")?.unwrap_or(false),
        ..read_sizes(fields, defaults)?
    });
    // A window is in all layers, if there is one.
    match fields.flag("use_sliding_window")? {
        Some(true) => read_one_window(fields, config, Some(4096)),
        _ => Ok(()),
    }
}
