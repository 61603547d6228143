//! GLM-4.x with experts, such as GLM-4.5-Air.

use super::super::fields::Fields;
use super::experts_json::{read_sizes, set_experts, write_sizes};
use super::table::{Defaults, FamilyTable};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::experts::{Experts, SharedExpert, SigmoidRouter};

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "glm4_moe",
    architecture: "Glm4MoeForCausalLM",
    defaults: Defaults {
        max_position_embeddings: 131_072,
        num_key_value_heads: Some(8),
        rms_norm_eps: 1e-5,
        partial_rotary_factor: 0.5,
        ..Defaults::USUAL
    },
    reads: &[
        "n_routed_experts",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "partial_rotary_factor",
        "use_qk_norm",
    ],
    read,
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        json["use_qk_norm"] = config.qk_norm.into();
        json["partial_rotary_factor"] = config.partial_rotary_factor.into();
        json["first_k_dense_replace"] = first_dense(config).into();
        write_sizes(config, "n_routed_experts", json);
        let Some(experts) = &config.experts else { return };
        let router = experts.sigmoid.unwrap_or_default();
        let width = experts.shared_expert.map_or(0, |shared| shared.intermediate_size);
        json["moe_intermediate_size"] = experts.moe_intermediate_size.into();
        json["n_shared_experts"] = (width / experts.moe_intermediate_size.max(1)).into();
        json["norm_topk_prob"] = experts.norm_topk_prob.into();
        json["n_group"] = router.n_group.into();
        json["topk_group"] = router.topk_group.into();
        json["routed_scaling_factor"] = router.routed_scaling_factor.into();
    },
};

/// Returns the number of first layers without experts.
fn first_dense(config: &ModelConfig) -> usize {
    (0..config.num_hidden_layers).take_while(|layer| config.experts_of(*layer).is_none()).count()
}

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false);
    let dense = fields.count("first_k_dense_replace")?.unwrap_or(1);
    if dense >= config.num_hidden_layers {
        let supported = format!("less than num_hidden_layers, {}: a layer with experts", config.num_hidden_layers);
        return Err(fields.unsupported("first_k_dense_replace", supported));
    }
    let count = |key, default| Ok::<_, crate::Error>(fields.count(key)?.unwrap_or(default));
    let width = count("moe_intermediate_size", 1408)?;
    let (shared, groups, chosen) = (count("n_shared_experts", 1)?, count("n_group", 1)?, count("topk_group", 1)?);
    if shared == 0 {
        return Err(fields.unsupported("n_shared_experts", "at least 1: the class has shared experts in every layer"));
    }
    let all = count("n_routed_experts", count("num_local_experts", 128)?)?;
    if groups == 0 || !all.is_multiple_of(groups) || all / groups < 2 {
        let supported = format!("a divisor of n_routed_experts, {all}, with at least two experts in a group");
        return Err(fields.unsupported("n_group", supported));
    }
    if !(1..=groups).contains(&chosen) {
        return Err(fields.unsupported("topk_group", format!("between 1 and n_group, {groups}")));
    }
    let defaults = Experts { num_experts_per_tok: 8, ..Experts::default() };
    let experts = Experts {
        num_experts: all,
        moe_intermediate_size: width,
        norm_topk_prob: fields.flag("norm_topk_prob")?.unwrap_or(true),
        shared_expert: Some(SharedExpert { intermediate_size: width.saturating_mul(shared), is_gated: false }),
        sigmoid: Some(SigmoidRouter {
            n_group: groups,
            topk_group: chosen,
            routed_scaling_factor: fields.number("routed_scaling_factor")?.unwrap_or(1.0),
        }),
        ..read_sizes(fields, defaults)?
    };
    if experts.num_experts_per_tok > chosen * (all / groups) {
        let supported = format!("at most {}, the experts of topk_group groups", chosen * (all / groups));
        return Err(fields.unsupported("num_experts_per_tok", supported));
    }
    set_experts(config, experts, |layer| layer < dense);
    Ok(())
}
