//! gpt-oss: 20B and 120B.

use super::super::fields::Fields;
use super::super::rope_json;
use super::experts_json::{read_sizes, write_sizes};
use super::layer_types::{positive_window, set_windows, sliding_layers};
use super::table::{Defaults, FamilyTable};
use crate::config::{ModelConfig, RopeScaling, RopeType};
use crate::error::Result;
use crate::experts::{ClampedSwiglu, Experts};

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    defaults: Defaults {
        max_position_embeddings: 131_072,
        num_key_value_heads: Some(8),
        head_dim: Some(64),
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        ..Defaults::USUAL
    },
    reads: &["num_experts", "num_local_experts", "num_experts_per_tok", "quantization_config"],
    read,
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        let layers = || (0..config.num_hidden_layers).map(|index| config.layer(index).sliding_window);
        let name = |window: Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
        json["layer_types"] = layers().map(name).collect();
        json["sliding_window"] = layers().flatten().next().into();
        if config.rope_scaling.is_none() {
            // Without the field, the class has scaled frequencies.
            json["rope_scaling"] = serde_json::json!({"rope_type": "default"});
        }
        write_sizes(config, "num_local_experts", json);
        let clamped = config.experts.as_ref().and_then(|experts| experts.clamped).unwrap_or_default();
        json["swiglu_alpha"] = clamped.swiglu_alpha.into();
        json["swiglu_limit"] = clamped.swiglu_limit.into();
    },
};

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    if let Some(quantization) = fields.object("quantization_config")?
        && quantization.text("quant_method")? != Some("mxfp4")
    {
        return Err(quantization.unsupported("quant_method", "mxfp4"));
    }
    config.attention_bias = fields.flag("attention_bias")?.unwrap_or(true);
    (config.attention_output_bias, config.attention_sinks) = (config.attention_bias, true);
    let clamped = ClampedSwiglu::default();
    let clamped = ClampedSwiglu {
        swiglu_alpha: fields.number("swiglu_alpha")?.unwrap_or(clamped.swiglu_alpha),
        swiglu_limit: fields.number("swiglu_limit")?.unwrap_or(clamped.swiglu_limit),
    };
    let defaults = Experts { num_experts: 128, num_experts_per_tok: 4, ..Experts::default() };
    config.experts = Some(Experts {
        moe_intermediate_size: config.intermediate_size,
        norm_topk_prob: true,
        clamped: Some(clamped),
        ..read_sizes(fields, defaults)?
    });
    if rope_json::object(fields)?.is_none() {
        config.rope_scaling = Some(RopeScaling {
            rope_type: RopeType::Yarn,
            factor: 32.0,
            original_max_position_embeddings: 4096,
            truncate: false,
            attention_factor: 0.1 * 32f64.ln() + 1.0,
            ..RopeScaling::default()
        });
    }
    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = if is_missing { Some(128) } else { positive_window(fields)? };
    if window.is_none() && fields.get("layer_types").is_none() {
        let supported = "at least 1: the class has sliding layers without layer_types";
        return Err(fields.unsupported("sliding_window", supported));
    }
    let sliding = sliding_layers(fields, config, window, |layer| layer.is_multiple_of(2))?;
    set_windows(config, window, &sliding);
    Ok(())
}
