//! Reads `config.json`, as far as it defines the computation of a decoder, in both layouts that `transformers` writes.
//!
//! Version 4 has `rope_theta`, `rope_scaling` and `torch_dtype`; version 5 has `rope_parameters` and `dtype`. Missing fields have the
//! defaults of the classes in `transformers`.

use super::fields::{Fields, Neutral};
use crate::config::{ModelConfig, RopeScaling};
use crate::error::{Error, Result};
use crate::weights::Dtype;
use serde_json::Value;
use std::fmt;

/// A supported family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: RMSNorm on every query and key head.
    Qwen3,
    /// Llama 2 and 3: neither biases nor norms.
    Llama,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 3] = [Self::Qwen2, Self::Qwen3, Self::Llama];

    /// Returns the family with the features of `config`: `qk_norm` is Qwen3's, `attention_bias` is Qwen2's.
    ///
    /// # Errors
    /// [`Error::Config`] for both features, which no family of `transformers` combines.
    pub fn of(config: &ModelConfig) -> Result<Self> {
        match (config.qk_norm, config.attention_bias) {
            (true, false) => Ok(Self::Qwen3),
            (false, true) => Ok(Self::Qwen2),
            (false, false) => Ok(Self::Llama),
            (true, true) => Err(Error::Config {
                key: "model.qk_norm",
                expected:
                    "no attention_bias beside it: no family of transformers has norms and biases of q, k and v alone"
                        .into(),
                found: "qk_norm: true, attention_bias: true".into(),
            }),
        }
    }

    /// Returns `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Llama => "llama",
        }
    }

    /// Returns the only entry of `architectures` in `config.json`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Llama => "LlamaForCausalLM",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// The contents of a `config.json`.
pub(crate) struct ConfigJson {
    pub(crate) family: Family,
    pub(crate) config: ModelConfig,
    /// The dtype of the weights according to the file.
    pub(crate) dtype: Option<Dtype>,
}

impl ConfigJson {
    /// Reads and checks every field that changes the computation.
    pub(crate) fn read(fields: &Fields) -> Result<Self> {
        let family = family(fields)?;
        let config = config(fields, family)?;
        refuse_other_mathematics(fields, family, &config)?;
        config.validate().map_err(|error| match error {
            Error::Config { key, expected, .. } => {
                fields.unsupported(key.strip_prefix("model.").unwrap_or(key), expected)
            }
            other => other,
        })?;
        Ok(Self { family, config, dtype: dtype(fields)? })
    }
}

fn family(fields: &Fields) -> Result<Family> {
    let known = |name: fn(Family) -> &'static str| Family::ALL.map(name).join(", ");
    let expected = || fields.unsupported("architectures", format!("one of {}", known(Family::architecture)));
    let architectures = fields.typed("architectures", "a list with one name", Value::as_array)?;
    let architecture = architectures.filter(|list| !list.is_empty()).map(|list| {
        let family = Family::ALL.into_iter().find(|family| **list == [family.architecture()]);
        family.ok_or_else(expected)
    });
    let kind = fields.text("model_type")?.map(|name| {
        let family = Family::ALL.into_iter().find(|family| family.model_type() == name);
        family.ok_or_else(|| fields.unsupported("model_type", known(Family::model_type)))
    });
    match (kind.transpose()?, architecture.transpose()?) {
        (Some(kind), Some(architecture)) if kind != architecture => {
            Err(fields.unsupported("architectures", format!("{} for model_type {kind}", kind.architecture())))
        }
        (Some(family), _) | (None, Some(family)) => Ok(family),
        (None, None) => Err(fields.unsupported("model_type", known(Family::model_type))),
    }
}

fn config(fields: &Fields, family: Family) -> Result<ModelConfig> {
    let size = |key| fields.required(key, fields.count(key)?, "a whole number above 0");
    let num_attention_heads = size("num_attention_heads")?;
    let max_position_embeddings =
        fields.count("max_position_embeddings")?.unwrap_or(if family == Family::Llama { 2048 } else { 32768 });
    let (rope_theta, rope_scaling) = rope(fields, max_position_embeddings)?;
    let head_dim = match (fields.count("head_dim")?, family) {
        (None, Family::Qwen3) => Some(128),
        (given, _) => given,
    };
    Ok(ModelConfig {
        vocab_size: size("vocab_size")?,
        hidden_size: size("hidden_size")?,
        intermediate_size: size("intermediate_size")?,
        num_hidden_layers: size("num_hidden_layers")?,
        num_attention_heads,
        num_key_value_heads: match fields.count("num_key_value_heads")? {
            Some(heads) => heads,
            // The Qwen classes have a default for a missing field, but use this value for null.
            None if family == Family::Llama || fields.keys().any(|key| key == "num_key_value_heads") => {
                num_attention_heads
            }
            None => 32,
        },
        head_dim,
        max_position_embeddings,
        rope_theta,
        rope_scaling,
        attention_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        pad_token_id: fields.count_or_none("pad_token_id")?,
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
    })
}

/// Returns the base of the rotary frequencies and their scaling. As in `transformers`, `rope_scaling` takes precedence over
/// `rope_parameters`, and a base in either of them over the separate field.
fn rope(fields: &Fields, max_position_embeddings: usize) -> Result<(f64, Option<RopeScaling>)> {
    let outer = fields.number("rope_theta")?.unwrap_or(10_000.0);
    let mut found = None;
    for key in ["rope_scaling", "rope_parameters"] {
        found = found.or(fields.object(key)?);
    }
    let Some(rope) = found else { return Ok((outer, None)) };
    if rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some() {
        return Err(
            rope.unsupported("full_attention", "the same rotary positions in every layer, not nested by layer type")
        );
    }
    for key in ["partial_rotary_factor", "mrope_section"] {
        if rope.get(key).is_some_and(|value| value.as_f64() != Some(1.0)) {
            return Err(rope.unsupported(key, "nothing: every column of a head is turned by its position"));
        }
    }
    let theta = rope.number("rope_theta")?.unwrap_or(outer);
    // Named `type` before version 4.43.
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    match rope.text(key)? {
        None | Some("default") => Ok((theta, None)),
        Some("llama3") => {
            let number = |key| rope.required(key, rope.number(key)?, "a number");
            let inner = rope.count("original_max_position_embeddings")?;
            let beside = fields.count("original_max_position_embeddings")?;
            if let (Some(inner), Some(beside)) = (inner, beside)
                && inner != beside
            {
                return Err(fields.unsupported(
                    "original_max_position_embeddings",
                    format!(
                        "{inner}, which rope scaling says; versions of transformers differ in which of both they take"
                    ),
                ));
            }
            let scaling = RopeScaling {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: inner.or(beside).unwrap_or(max_position_embeddings),
            };
            Ok((theta, Some(scaling)))
        }
        Some(_) => Err(rope.unsupported(key, "default, llama3")),
    }
}

fn dtype(fields: &Fields) -> Result<Option<Dtype>> {
    let key = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let name = fields.text(key)?.map(|name| name.strip_prefix("torch.").unwrap_or(name));
    let dtype = name.filter(|&name| name != "auto").map(|name| {
        Dtype::ALL
            .into_iter()
            .find(|dtype| dtype.torch_name() == name)
            .ok_or_else(|| fields.unsupported(key, Dtype::ALL.map(Dtype::torch_name).join(", ")))
    });
    dtype.transpose()
}

/// Fields that ask for something unsupported, with the supported computation. Some belong to other families; in a file of a supported
/// family they mean that its weights have another meaning.
const OTHER_MATHEMATICS: &[(&str, Neutral, &str)] = &[
    ("quantization_config", Neutral::Off, "weights that are not quantised (F32, BF16, F16)"),
    ("compression_config", Neutral::Off, "weights that are not compressed (F32, BF16, F16)"),
    ("mlp_bias", Neutral::Off, "false: MLPs without biases"),
    ("attention_dropout", Neutral::Off, "0: attention without dropout"),
    ("hidden_dropout", Neutral::Off, "0: no dropout"),
    ("resid_pdrop", Neutral::Off, "0: no dropout"),
    ("embd_pdrop", Neutral::Off, "0: no dropout"),
    ("num_experts", Neutral::Off, "dense MLPs, no mixture of experts"),
    ("num_local_experts", Neutral::Off, "dense MLPs, no mixture of experts"),
    ("n_routed_experts", Neutral::Off, "dense MLPs, no mixture of experts"),
    ("num_experts_per_tok", Neutral::Off, "dense MLPs, no mixture of experts"),
    ("num_nextn_predict_layers", Neutral::Off, "0: one head that predicts the next token"),
    ("attn_logit_softcapping", Neutral::Off, "null: attention without a softcap"),
    ("attn_logit_softcap", Neutral::Off, "null: attention without a softcap"),
    ("final_logit_softcapping", Neutral::Off, "null: logits without a softcap"),
    ("logits_soft_cap", Neutral::Off, "null: logits without a softcap"),
    ("partial_rotary_factor", Neutral::One, "1: every column of a head is turned by its position"),
    ("rotary_pct", Neutral::One, "1: every column of a head is turned by its position"),
    ("logit_scale", Neutral::One, "1: logits that are not scaled"),
    ("logits_scaling", Neutral::One, "1: logits that are not scaled"),
    ("embedding_multiplier", Neutral::One, "1: embeddings that are not scaled"),
    ("residual_multiplier", Neutral::One, "1: residuals that are not scaled"),
    ("attention_multiplier", Neutral::Off, "null: attention scaled by 1/sqrt(head_dim)"),
    ("use_qk_norm", Neutral::Off, "false: Qwen3 normalises queries and keys without this field"),
    ("no_rope_layers", Neutral::Off, "null: rotary positions in every layer"),
    ("no_rope_layer_interval", Neutral::Off, "null: rotary positions in every layer"),
    ("per_layer_config", Neutral::Off, "null: layers that are alike"),
    ("is_encoder_decoder", Neutral::Off, "false: a decoder alone"),
    ("add_cross_attention", Neutral::Off, "false: a decoder alone"),
    ("use_bidirectional_attention", Neutral::Off, "false: causal attention"),
    ("is_causal", Neutral::On, "true: causal attention"),
];

fn refuse_other_mathematics(fields: &Fields, family: Family, config: &ModelConfig) -> Result<()> {
    fields.refuse(OTHER_MATHEMATICS)?;
    for key in ["hidden_act", "hidden_activation"] {
        // `swish` is another name for the same function.
        if fields.text(key)?.is_some_and(|name| !["silu", "swish"].contains(&name)) {
            return Err(fields.unsupported(key, "silu"));
        }
    }
    // Qwen2 always has these biases. In Llama and Qwen3 the field also adds a bias to o_proj.
    if family != Family::Qwen2 && fields.flag("attention_bias")? == Some(true) {
        let supported = format!("false: in {family} it also adds a bias to o_proj, which is not computed here");
        return Err(fields.unsupported("attention_bias", supported));
    }
    let layer_types = fields.typed("layer_types", "a list of texts", Value::as_array)?;
    if let Some(types) = layer_types {
        if types.iter().any(|kind| kind != "full_attention") {
            return Err(fields.unsupported("layer_types", "full_attention in every layer"));
        }
        if types.len() != config.num_hidden_layers {
            let supported = format!("one entry for each of the {} layers", config.num_hidden_layers);
            return Err(fields.unsupported("layer_types", supported));
        }
    } else if family != Family::Llama && fields.flag("use_sliding_window")? == Some(true) {
        // Llama's code has no sliding window. In Qwen's, layers from `max_window_layers` on have one.
        let absent = !fields.keys().any(|key| key == "sliding_window");
        let window = if absent { Some(4096) } else { fields.count("sliding_window")? };
        let first = fields.count("max_window_layers")?.unwrap_or(28);
        if first < config.num_hidden_layers && window.is_some_and(|window| window < config.max_position_embeddings) {
            return Err(fields.unsupported(
                "use_sliding_window",
                format!(
                    "false, or a sliding_window of at least max_position_embeddings ({}), or a max_window_layers of at least \
                     num_hidden_layers ({})",
                    config.max_position_embeddings, config.num_hidden_layers
                ),
            ));
        }
    }
    Ok(())
}
