//! The families of decoders: each is a table from `config.json` to [`ModelConfig`], in a file of its own.

mod experts_json;
pub(super) mod gemma3;
pub(super) mod gemma4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod layer_types;
mod llama;
pub(super) mod mistral;
mod olmo;
mod phi3;
pub(super) mod qwen;
pub(super) mod qwen3_5;
mod qwen_moe;
mod smollm3;

use super::config_json::ConfigJson;
use super::fields::Fields;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::Dtype;
use serde_json::{Value, json};
use std::fmt;

/// A supported family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: RMSNorm on every query and key head.
    Qwen3,
    /// Qwen2-MoE: Qwen2 with mixtures of experts, and a shared expert with a gate.
    Qwen2Moe,
    /// GLM-4.x with experts: first layers without experts, sigmoid routers, shared experts, partly rotated heads.
    Glm4Moe,
    /// Qwen3-MoE: Qwen3 with mixtures of experts.
    Qwen3Moe,
    /// Qwen3.5: a Gated DeltaNet in three of four layers, attention with output gates in the fourth, norms with weights around 0.
    Qwen3_5,
    /// gpt-oss: attention sinks, biases, a sliding window in every other layer, YaRN, experts with a clamped SwiGLU.
    GptOss,
    /// Llama 2 and 3: neither biases nor norms.
    Llama,
    /// Mistral 7B and Nemo: Llama with a sliding window in the first versions.
    Mistral,
    /// Ministral 3: YaRN, and queries that grow beyond the original context.
    Ministral3,
    /// SmolLM3: Llama without rotary embeddings in every fourth layer.
    SmolLm3,
    /// OLMo 2: norms of outputs instead of inputs, and of all query and all key heads together.
    Olmo2,
    /// OLMo 3: OLMo 2 with a sliding window in three of four layers.
    Olmo3,
    /// Granite 3: Llama with factors of embeddings, residuals, scores and logits.
    Granite,
    /// Phi-3 and Phi-4: fused projections, partly rotated heads, LongRoPE.
    Phi3,
    /// Gemma 3 without vision: norms of inputs and outputs with weights around 0, GeGLU, a sliding window in five of six layers.
    Gemma3,
    /// Gemma 4, dense and without vision: layers with full attention have wider heads, and may have keys as values.
    Gemma4,
}

/// The reading and writing of a family's `config.json`. Fields that all families have are read by [`ConfigJson`].
pub(super) struct FamilyTable {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) defaults: Defaults,
    /// Fields that other families refuse, and this one reads.
    pub(super) reads: &'static [&'static str],
    /// Adds the family's own fields to a configuration with the common ones.
    pub(super) read: fn(&Fields, &mut ModelConfig) -> Result<()>,
    /// Adds the family's own fields to a `config.json` with the common ones.
    pub(super) write: fn(&ModelConfig, &mut Value),
}

/// The values of missing fields, as in the family's class of `transformers`.
pub(super) struct Defaults {
    /// The sizes that files may leave to the class, by field.
    pub(super) sizes: &'static [(&'static str, usize)],
    pub(super) max_position_embeddings: usize,
    /// `None` is `num_attention_heads`.
    pub(super) num_key_value_heads: Option<usize>,
    /// `None` is `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    pub(super) rms_norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) partial_rotary_factor: f64,
    pub(super) tie_word_embeddings: bool,
    pub(super) pad_token_id: Option<usize>,
}

impl Defaults {
    /// The values of most classes.
    pub(super) const USUAL: Self = Self {
        sizes: &[],
        max_position_embeddings: 2048,
        num_key_value_heads: None,
        head_dim: None,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        partial_rotary_factor: 1.0,
        tie_word_embeddings: false,
        pad_token_id: None,
    };
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 17] = [
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Qwen3_5,
        Self::GptOss,
        Self::Llama,
        Self::Mistral,
        Self::Ministral3,
        Self::SmolLm3,
        Self::Olmo2,
        Self::Olmo3,
        Self::Granite,
        Self::Phi3,
        Self::Gemma3,
        Self::Gemma4,
        Self::Qwen2Moe,
        Self::Glm4Moe,
    ];

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
            "rope_scaling": super::rope_json::written(config),
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

    /// Returns `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        self.table().model_type
    }

    /// Returns the prefix of tensors in the family's files that its class ignores, and that exports carry along: layers that predict further tokens.
    pub(crate) fn carried_prefix(self, config: &ModelConfig) -> Option<String> {
        match self {
            Self::Qwen3_5 => Some("mtp.".to_owned()),
            Self::Glm4Moe => Some(format!("model.layers.{}.", config.num_hidden_layers)),
            _ => None,
        }
    }

    /// Returns the only entry of `architectures` in `config.json`.
    pub fn architecture(self) -> &'static str {
        self.table().architecture
    }

    pub(super) fn table(self) -> &'static FamilyTable {
        match self {
            Self::Qwen2 => &qwen::QWEN2,
            Self::Qwen3 => &qwen::QWEN3,
            Self::Glm4Moe => &glm4_moe::TABLE,
            Self::Qwen2Moe => &qwen_moe::QWEN2_MOE,
            Self::Qwen3Moe => &qwen_moe::QWEN3_MOE,
            Self::Qwen3_5 => &qwen3_5::TABLE,
            Self::GptOss => &gpt_oss::TABLE,
            Self::Llama => &llama::TABLE,
            Self::Mistral => &mistral::MISTRAL,
            Self::Ministral3 => &mistral::MINISTRAL3,
            Self::SmolLm3 => &smollm3::TABLE,
            Self::Olmo2 => &olmo::OLMO2,
            Self::Olmo3 => &olmo::OLMO3,
            Self::Granite => &granite::TABLE,
            Self::Phi3 => &phi3::TABLE,
            Self::Gemma3 => &gemma3::TABLE,
            Self::Gemma4 => &gemma4::TABLE,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// Reads `attention_bias`: biases of q_proj, k_proj, v_proj and o_proj. Qwen2 has biases without the field, and none in o_proj.
fn read_attention_bias(fields: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.attention_output_bias = config.attention_bias;
    Ok(())
}

/// Refuses `attention_bias: true`.
fn without_attention_bias(fields: &Fields, family: Family) -> Result<()> {
    if fields.flag("attention_bias")? == Some(true) {
        let supported = format!("false: biases of q_proj, k_proj, v_proj and o_proj are not computed for {family}");
        return Err(fields.unsupported("attention_bias", supported));
    }
    Ok(())
}
