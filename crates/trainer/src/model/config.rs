//! Shape of the decoder, with Hugging Face's names.

use crate::error::Result;
use crate::tokenizer::Tokenizer;
use crate::train_config::check;
use serde::{Deserialize, Serialize};

/// Shape and initialisation of a [`crate::model::Decoder`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// V: number of tokens; the trainer wants the tokenizer's.
    pub vocab_size: usize,
    /// H: width of the residual stream.
    pub hidden_size: usize,
    /// I: width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// A: query heads; D = hidden_size / num_attention_heads.
    pub num_attention_heads: usize,
    /// K: key/value heads, a divisor of num_attention_heads.
    pub num_key_value_heads: usize,
    /// Longest sequence, prompt and completion together.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the LM head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial matrices; those that write to the residual stream are scaled down by
    /// sqrt(2 x num_hidden_layers) (GPT-2).
    pub initializer_range: f64,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            vocab_size: Tokenizer::VOCAB_SIZE,
            hidden_size: 64,
            intermediate_size: 192,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 64,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            initializer_range: 0.08,
        }
    }
}

impl ModelConfig {
    /// D: width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
    pub fn validate(&self) -> Result<()> {
        // Every limit is far above what this trainer can train and far below what would overflow an allocation.
        for (key, value, limit) in [
            ("model.vocab_size", self.vocab_size, 1 << 20),
            ("model.hidden_size", self.hidden_size, 1 << 16),
            ("model.intermediate_size", self.intermediate_size, 1 << 18),
            ("model.num_hidden_layers", self.num_hidden_layers, 1 << 10),
            ("model.num_attention_heads", self.num_attention_heads, 1 << 10),
            ("model.num_key_value_heads", self.num_key_value_heads, 1 << 10),
            ("model.max_position_embeddings", self.max_position_embeddings, 1 << 20),
        ] {
            check((1..=limit).contains(&value), key, &format!("between 1 and {limit}"), value)?;
        }
        let heads = self.num_attention_heads;
        check(
            self.hidden_size.is_multiple_of(heads) && self.head_dim().is_multiple_of(2),
            "model.hidden_size",
            "an even multiple of num_attention_heads (rotary positions turn pairs)",
            format!("{} for {heads} heads", self.hidden_size),
        )?;
        check(
            heads.is_multiple_of(self.num_key_value_heads),
            "model.num_key_value_heads",
            "a divisor of num_attention_heads",
            format!("{} for {heads} heads", self.num_key_value_heads),
        )?;
        for (key, value) in [
            ("model.rope_theta", self.rope_theta),
            ("model.rms_norm_eps", self.rms_norm_eps),
            ("model.initializer_range", self.initializer_range),
        ] {
            check(value.is_finite() && value > 0.0, key, "a number above 0", value)?;
        }
        Ok(())
    }
}
