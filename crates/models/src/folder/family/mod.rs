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
mod table;

pub(super) use table::{Defaults, FamilyTable};

use crate::config::ModelConfig;
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
