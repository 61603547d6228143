//! The dense models of Gemma 4, which are wrapped in a model of images and text.

use super::super::fields::{Fields, Neutral};
use super::super::rope_json;
use super::layer_types::{effective, positive_window, sliding_layers, write_layers_with_ropes};
use super::table::{Defaults, FamilyTable, without_attention_bias};
use crate::config::{ModelConfig, RopeScaling, RopeType};
use crate::error::Result;
use crate::layer::{Activation, LayerRope, LayerSpec, NormPlacement};
use serde_json::Value;

pub(crate) const TABLE: FamilyTable = FamilyTable {
    model_type: "gemma4_text",
    architecture: "Gemma4ForCausalLM",
    defaults: Defaults {
        sizes: &[
            ("vocab_size", 262_144),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 8),
        ],
        max_position_embeddings: 131_072,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        rope_theta: 1e6,
        tie_word_embeddings: true,
        pad_token_id: Some(0),
        ..Defaults::USUAL
    },
    reads: &[
        // The class does not read `hidden_act`.
        "hidden_act",
        "hidden_activation",
        "final_logit_softcapping",
        "per_layer_config",
        "use_bidirectional_attention",
        rope_json::BY_LAYER_TYPE,
    ],
    read,
    write,
};

/// The width of a head of full attention in a file that does not say it.
const FULL_WIDTH: usize = 512;
/// The share of rotated pairs of columns of full attention in a file without `rope_parameters`.
const FULL_SHARE: f64 = 0.25;

/// Fields of Gemma 4's other models.
const OTHER_MODELS: &[(&str, Neutral, &str)] = &[
    ("num_kv_shared_layers", Neutral::Off, "0: every layer computes its own keys and values, as in Gemma 4 31B"),
    ("enable_moe_block", Neutral::Off, "false: dense MLPs and no mixture of experts, as in Gemma 4 31B"),
];

fn read(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    without_attention_bias(fields, TABLE.model_type)?;
    fields.refuse(OTHER_MODELS)?;
    if fields.count("hidden_size_per_layer_input")? != Some(0) {
        let supported = "0: no embeddings of layers, as in Gemma 4 31B (a missing field means 256)";
        return Err(fields.unsupported("hidden_size_per_layer_input", supported));
    }
    if fields.text("use_bidirectional_attention")?.is_some_and(|kind| kind != "vision") {
        let supported = "null or vision: causal attention among tokens of text";
        return Err(fields.unsupported("use_bidirectional_attention", supported));
    }
    let activation = fields.text("hidden_activation")?.unwrap_or(Activation::GeluTanh.name());
    if activation != Activation::GeluTanh.name() {
        return Err(fields.unsupported("hidden_activation", Activation::GeluTanh.name()));
    }
    (config.hidden_act, config.norm_placement) = (Activation::GeluTanh, NormPlacement::Both);
    (config.qk_norm, config.value_norm, config.layer_scalars) = (true, true, true);
    config.embedding_multiplier = (config.hidden_size as f64).sqrt();
    config.attention_multiplier = Some(1.0);
    config.final_logit_softcapping = fields.number("final_logit_softcapping")?;

    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = if is_missing { Some(512) } else { positive_window(fields)? };
    let mut sliding = sliding_layers(fields, config, window, |layer| !(layer + 1).is_multiple_of(6))?;
    // The class gives the last layer full attention in any case.
    if let Some(last) = sliding.last_mut() {
        *last = false;
    }
    let theta = match rope_json::read_by_layer_type(fields, config)? {
        Some(theta) => theta,
        None => {
            let scaling = RopeScaling { rope_type: RopeType::Proportional, ..RopeScaling::default() };
            config.rope_scaling = Some(RopeScaling { partial_rotary_factor: FULL_SHARE, ..scaling });
            10_000.0
        }
    };
    let full = full_layer(fields, config, &sliding)?;
    let window = effective(window, config);
    let local = LayerSpec { sliding_window: window, rope: LayerRope::Local, ..LayerSpec::default() };
    config.layers = ModelConfig::shortest(sliding.iter().map(|slides| if *slides { local } else { full }).collect());
    config.rope_local_theta = Some(theta).filter(|_| sliding.contains(&true));
    Ok(())
}

/// Reads the heads of layers with full attention: `per_layer_config`, which `transformers` writes, or the fields of files on the Hub.
fn full_layer(fields: &Fields, config: &ModelConfig, sliding: &[bool]) -> Result<LayerSpec> {
    let keys_are_values = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let mut width = Some(fields.count("global_head_dim")?.unwrap_or(FULL_WIDTH));
    let mut keys = if keys_are_values { fields.count("num_global_key_value_heads")? } else { None };
    if let Some(layers) = fields.object("per_layer_config")? {
        let full = (0..sliding.len()).filter(|index| !sliding[*index]);
        let full: Vec<String> = full.map(|index| index.to_string()).collect();
        let first = full.first().map(|index| layers.object(index)).transpose()?.flatten();
        let is_known = |key: &str| ["head_dim", "num_key_value_heads"].contains(&key);
        let are_known = first.iter().all(|layer| layer.keys().all(is_known));
        let are_alike = full.iter().all(|index| layers.get(index) == layers.get(&full[0]));
        let are_all = layers.keys().count() == if first.is_some() { full.len() } else { 0 };
        if !(are_known && are_alike && are_all) {
            let supported =
                "head_dim and num_key_value_heads, the same in all layers with full_attention, and nothing for others";
            return Err(fields.unsupported("per_layer_config", supported));
        }
        let of_first = |key| first.as_ref().map_or(Ok(None), |layer| layer.count(key));
        (width, keys) = (of_first("head_dim")?, of_first("num_key_value_heads")?);
    }
    if width.is_some_and(|width| width == 0 || !width.is_multiple_of(2)) {
        let supported = "an even number above 0, in global_head_dim or per_layer_config";
        return Err(fields.unsupported("global_head_dim", supported));
    }
    if keys.is_some_and(|keys| keys == 0 || !config.num_attention_heads.is_multiple_of(keys)) {
        let supported = "a divisor of num_attention_heads, in num_global_key_value_heads or per_layer_config";
        return Err(fields.unsupported("num_global_key_value_heads", supported));
    }
    Ok(LayerSpec {
        head_dim: width.filter(|own| *own != config.head_dim()),
        num_key_value_heads: keys.filter(|own| *own != config.num_key_value_heads),
        keys_are_values,
        ..LayerSpec::default()
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    if let Value::Object(json) = json {
        json.remove("hidden_act");
    }
    json["hidden_activation"] = config.hidden_act.name().into();
    json["attention_bias"] = false.into();
    json["final_logit_softcapping"] = config.final_logit_softcapping.into();
    json["hidden_size_per_layer_input"] = 0.into();
    write_layers_with_ropes(config, json);
    // The last layer has full attention.
    let full = config.layer(config.num_hidden_layers.saturating_sub(1));
    let heads = config.heads(full);
    json["global_head_dim"] = heads.width.into();
    json["attention_k_eq_v"] = full.keys_are_values.into();
    json["num_global_key_value_heads"] = Some(heads.key_value).filter(|_| full.keys_are_values).into();
}
