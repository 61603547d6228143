//! The fields of mixtures of experts in `config.json` that several families have.

use super::super::fields::Fields;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::experts::Experts;
use crate::layer::LayerSpec;
use serde_json::Value;

/// The fields that families with experts read, and others refuse.
pub(super) const READS: &[&str] = &["num_experts", "num_local_experts", "num_experts_per_tok"];

/// Reads the number of experts and the number of experts of a token; `defaults` has the values of missing fields.
pub(super) fn read_sizes(fields: &Fields, defaults: Experts) -> Result<Experts> {
    // transformers 5 writes the newer name and reads both.
    let (old, new) = (fields.count("num_experts")?, fields.count("num_local_experts")?);
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        return Err(fields.unsupported("num_local_experts", format!("{old}, as num_experts")));
    }
    if fields.flag("output_router_logits")? == Some(true) {
        let supported = "false: no load balancing loss is added to the loss";
        return Err(fields.unsupported("output_router_logits", supported));
    }
    Ok(Experts {
        num_experts: old.or(new).unwrap_or(defaults.num_experts),
        num_experts_per_tok: fields.count("num_experts_per_tok")?.unwrap_or(defaults.num_experts_per_tok),
        ..defaults
    })
}

/// Gives a configuration these experts in all layers that are not dense. A model whose layers are all dense has no experts.
pub(super) fn set_experts(config: &mut ModelConfig, experts: Experts, is_dense: impl Fn(usize) -> bool) {
    let layers = 0..config.num_hidden_layers;
    if experts.num_experts == 0 || layers.clone().all(&is_dense) {
        return;
    }
    let layer = |index| LayerSpec { dense_mlp: is_dense(index), ..config.layer(index) };
    config.layers = ModelConfig::shortest(layers.map(layer).collect());
    config.experts = Some(experts);
}

/// Writes the fields of [`read_sizes`]; the number of experts is `key`.
pub(super) fn write_sizes(config: &ModelConfig, key: &str, json: &mut Value) {
    let Some(experts) = &config.experts else { return };
    json[key] = experts.num_experts.into();
    json["num_experts_per_tok"] = experts.num_experts_per_tok.into();
    json["output_router_logits"] = false.into();
}
