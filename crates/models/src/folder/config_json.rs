//! Reads `config.json`, as far as it defines the computation of a decoder, in both layouts that `transformers` writes.
//!
//! Version 4 has `rope_theta`, `rope_scaling` and `torch_dtype`; version 5 has `rope_parameters` and `dtype`. Missing fields have the
//! defaults of the classes in `transformers`.

use super::family::{Defaults, Family, FamilyTable};
use super::fields::{Fields, Neutral, has_name};
use super::rope_json;
use super::wrapper::{self, Wrapper};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::Dtype;
use serde_json::{Value, json};

/// The contents of a `config.json`.
pub(crate) struct ConfigJson {
    pub(crate) family: Family,
    /// The model of images and text that the decoder belongs to.
    pub(crate) wrapper: Option<Wrapper>,
    pub(crate) config: ModelConfig,
    /// The dtype of the weights according to the file.
    pub(crate) dtype: Option<Dtype>,
}

impl ConfigJson {
    /// Reads and checks every field that changes the computation. `has_head` returns `true` if the files have an LM head, and
    /// `None` without files; only wrappers whose fields do not say whether the head is tied call it.
    pub(crate) fn read(fields: &Fields, has_head: impl FnOnce() -> Option<bool>) -> Result<Self> {
        let Some(wrapper) = wrapper::find(fields)? else {
            let family = family(fields)?;
            let config = decoder(fields, family.table())?;
            return Ok(Self { family, wrapper: None, config, dtype: dtype(fields)? });
        };
        let nested = wrapper::text_fields(fields, wrapper)?;
        if nested.is_some() {
            refuse_other_mathematics(fields, &[])?;
        }
        let (text, table) = (nested.as_ref().unwrap_or(fields), wrapper.table());
        let (family, of_text) = table.text(text)?;
        let mut config = decoder(text, of_text)?;
        config.tie_word_embeddings = table.tie(fields, text, has_head)?;
        let dtype = if let Some(dtype) = dtype(fields)? { Some(dtype) } else { dtype(text)? };
        Ok(Self { family, wrapper: Some(wrapper), config, dtype })
    }
}

impl Family {
    /// Returns the first family whose `config.json` can describe `config`.
    ///
    /// ```
    /// use grpo_models::{Family, ModelConfig};
    ///
    /// assert_eq!(Family::of(&ModelConfig::default())?, Family::Qwen2);
    /// let norms = ModelConfig { attention_bias: false, qk_norm: true, ..ModelConfig::default() };
    /// assert_eq!(Family::of(&norms)?, Family::Qwen3);
    /// # Ok::<(), grpo_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] if no family combines these features.
    pub fn of(config: &ModelConfig) -> Result<Self> {
        let is_glm = config.experts.as_ref().is_some_and(|experts| experts.sigmoid.is_some());
        if config.qk_norm && config.attention_bias && !config.attention_output_bias && !is_glm {
            return Err(Error::Config {
                key: "model.qk_norm",
                expected: "attention_output_bias: true, or no attention_bias, beside it: no family of transformers has norms and \
                           biases of q, k and v alone"
                    .into(),
                found: "qk_norm: true, attention_bias: true, attention_output_bias: false".into(),
            });
        }
        Self::ALL.into_iter().find(|family| family.describes(config)).ok_or_else(|| Error::Config {
            key: "model",
            expected: format!(
                "the features of one family, to be written to config.json: {}",
                Self::ALL.map(Self::model_type).join(", ")
            ),
            found: format!("{config:?}"),
        })
    }

    /// Returns `true` if the family's `config.json` for `config` reads as `config`.
    fn describes(self, config: &ModelConfig) -> bool {
        let Value::Object(json) = self.config_json(config, Dtype::F32) else { return false };
        ConfigJson::read(&Fields::of(json), || None).is_ok_and(|read| read.config.explicit() == config.explicit())
    }

    /// Returns the `config.json` of a model of this family, in the layout of transformers 4.
    pub(super) fn config_json(self, config: &ModelConfig, dtype: Dtype) -> Value {
        let mut json = json!({
            "architectures": [self.architecture()],
            "attention_dropout": 0.0,
            "hidden_act": config.hidden_act.name(),
            "hidden_size": config.hidden_size,
            "initializer_range": config.initializer_range,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position_embeddings,
            "model_type": self.model_type(),
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "pad_token_id": config.pad_token_id,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_scaling": rope_json::written(config),
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tie_word_embeddings,
            "torch_dtype": dtype.torch_name(),
            "use_cache": true,
            "vocab_size": config.vocab_size,
        });
        // Some classes have a default width, so the field is always written for them.
        if config.head_dim.is_some() || self.table().defaults.head_dim.is_some() {
            json["head_dim"] = config.head_dim().into();
        }
        (self.table().write)(config, &mut json);
        json
    }
}

/// Reads the configuration of a decoder.
fn decoder(fields: &Fields, table: &FamilyTable) -> Result<ModelConfig> {
    let mut config = config(fields, table)?;
    let of_file = |error| match error {
        Error::Config { key, expected, .. } => {
            let key = key.strip_prefix("model.").unwrap_or(key);
            let key = key.rsplit('.').next().unwrap_or(key);
            let is_new_name = key == "rope_scaling" && fields.get(key).is_none();
            fields.unsupported(if is_new_name { "rope_parameters" } else { key }, expected)
        }
        other => other,
    };
    // Families make lists with an entry per layer.
    config.validate_sizes().map_err(of_file)?;
    refuse_other_mathematics(fields, table.reads)?;
    refuse_other_activations(fields, table.reads)?;
    (table.read)(fields, &mut config)?;
    config.validate().map_err(of_file)?;
    Ok(config)
}

fn family(fields: &Fields) -> Result<Family> {
    let known = |of_family: fn(Family) -> &'static str, of_wrapper: fn(Wrapper) -> &'static str| {
        [&Family::ALL.map(of_family)[..], &Wrapper::ALL.map(of_wrapper)].concat().join(", ")
    };
    let types = || known(Family::model_type, Wrapper::model_type);
    let expected = || {
        let known = known(Family::architecture, Wrapper::architecture);
        fields.unsupported("architectures", format!("one of {known}"))
    };
    // Some files name the class of another task, or a class twice.
    let architectures =
        fields.typed("architectures", "a list of names", Value::as_array)?.filter(|list| !list.is_empty());
    let mut named: Vec<Family> =
        Family::ALL.into_iter().filter(|family| has_name(architectures, family.architecture())).collect();
    let kind = fields.text("model_type")?.map(|name| {
        let family = Family::ALL.into_iter().find(|family| family.model_type() == name);
        family.ok_or_else(|| fields.unsupported("model_type", types()))
    });
    let kind = kind.transpose()?;
    if architectures.is_some() && named.is_empty() {
        return Err(expected());
    }
    match kind {
        Some(kind) if named.is_empty() || named.contains(&kind) => Ok(kind),
        Some(kind) => {
            Err(fields.unsupported("architectures", format!("{} for model_type {kind}", kind.architecture())))
        }
        None if named.len() > 1 => {
            Err(fields.unsupported("model_type", format!("one, beside several architectures: {}", types())))
        }
        None => named.pop().ok_or_else(|| fields.unsupported("model_type", types())),
    }
}

/// Reads the fields that all families have.
fn config(fields: &Fields, table: &FamilyTable) -> Result<ModelConfig> {
    let (defaults, reads) = (&table.defaults, table.reads);
    let Defaults { max_position_embeddings, rms_norm_eps, rope_theta, tie_word_embeddings, pad_token_id, .. } =
        *defaults;
    let is_missing = |key: &str| !fields.keys().any(|known| known == key);
    let size = |key| {
        let default = defaults.sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size);
        fields.required(key, fields.count(key)?.or(default), "a whole number above 0")
    };
    let (num_attention_heads, vocab_size) = (size("num_attention_heads")?, size("vocab_size")?);
    let mut config = ModelConfig {
        vocab_size,
        hidden_size: size("hidden_size")?,
        intermediate_size: size("intermediate_size")?,
        num_hidden_layers: size("num_hidden_layers")?,
        num_attention_heads,
        num_key_value_heads: match fields.count("num_key_value_heads")? {
            Some(heads) => heads,
            // Classes with a default for a missing field use the number of query heads for null.
            None if is_missing("num_key_value_heads") => defaults.num_key_value_heads.unwrap_or(num_attention_heads),
            None => num_attention_heads,
        },
        head_dim: fields.count("head_dim")?.or(defaults.head_dim),
        max_position_embeddings: fields.count("max_position_embeddings")?.unwrap_or(max_position_embeddings),
        rope_theta,
        partial_rotary_factor: defaults.partial_rotary_factor,
        attention_bias: false,
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(rms_norm_eps),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(tie_word_embeddings),
        pad_token_id: if is_missing("pad_token_id") { pad_token_id } else { padding_row(fields, vocab_size)? },
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        ..ModelConfig::default()
    };
    rope_json::read(fields, &mut config, reads)?;
    Ok(config)
}

/// Reads the row of the embedding that gets no gradient. -1 is the last row, as in torch's `nn.Embedding`.
fn padding_row(fields: &Fields, vocab_size: usize) -> Result<Option<usize>> {
    let is_last = fields.get("pad_token_id").is_some_and(|value| value.as_f64() == Some(-1.0));
    if is_last { Ok(vocab_size.checked_sub(1)) } else { fields.count("pad_token_id") }
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

fn refuse_other_mathematics(fields: &Fields, reads: &[&str]) -> Result<()> {
    fields.refuse(OTHER_MATHEMATICS.iter().filter(|(key, ..)| !reads.contains(key)))
}

fn refuse_other_activations(fields: &Fields, reads: &[&str]) -> Result<()> {
    for key in ["hidden_act", "hidden_activation"].into_iter().filter(|key| !reads.contains(key)) {
        // `swish` is another name for the same function.
        if fields.text(key)?.is_some_and(|name| !["silu", "swish"].contains(&name)) {
            return Err(fields.unsupported(key, "silu"));
        }
    }
    Ok(())
}
