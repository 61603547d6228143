//! The configuration of a decoder, with the field names of Hugging Face's `config.json`.

use crate::error::{Result, check};
use crate::tokenizer::CharTokenizer;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The shape and initialisation of a decoder: the section `model` of a run's configuration.
///
/// ```
/// let qwen3 = models::ModelConfig { hidden_size: 48, head_dim: Some(32), ..Default::default() };
/// qwen3.validate()?;
/// assert_eq!(qwen3.head_dim(), 32);
/// assert_eq!(models::ModelConfig::default().head_dim(), 64 / 4);
/// # Ok::<(), models::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// V, the vocabulary size. The trainer requires the tokenizer's.
    #[default(CharTokenizer::VOCAB_SIZE)]
    pub vocab_size: usize,
    /// H, the width of the residual stream.
    #[default(64)]
    pub hidden_size: usize,
    /// I, the width of the MLP.
    #[default(192)]
    pub intermediate_size: usize,
    /// The number of blocks.
    #[default(2)]
    pub num_hidden_layers: usize,
    /// A, the number of query heads.
    #[default(4)]
    pub num_attention_heads: usize,
    /// K, the number of key/value heads, a divisor of `num_attention_heads`.
    #[default(2)]
    pub num_key_value_heads: usize,
    /// D, the width of a head, an even number. `None` is `hidden_size / num_attention_heads`; Qwen3 models set another width.
    pub head_dim: Option<usize>,
    /// The largest number of tokens of a sequence, prompt and completion together.
    #[default(64)]
    pub max_position_embeddings: usize,
    /// The base of the rotary frequencies.
    #[default(10_000.0)]
    pub rope_theta: f64,
    /// The scaling of rotary frequencies for contexts longer than in pre-training (Llama 3); `None` leaves them unscaled.
    pub rope_scaling: Option<RopeScaling>,
    /// `true` if the query, key and value projections have biases, as in Qwen2; Qwen3 and Llama 3 have none.
    #[default(true)]
    pub attention_bias: bool,
    /// `true` if every query and key head is normalised (RMSNorm over D with its own weights) before the rotary embedding, as in Qwen3.
    pub qk_norm: bool,
    /// The constant that RMSNorm adds to the mean square.
    #[default(1e-6)]
    pub rms_norm_eps: f64,
    /// `true` if the LM head shares the embedding matrix.
    pub tie_word_embeddings: bool,
    /// The padding token. As in `transformers` (`padding_idx` of torch's `nn.Embedding`), its embedding row gets no gradient from inputs, only
    /// from a tied head. `None` trains every row.
    pub pad_token_id: Option<usize>,
    /// The standard deviation of initial matrices. Matrices that write to the residual stream are divided by sqrt(2 x num_hidden_layers), as
    /// in GPT-2.
    #[default(0.08)]
    pub initializer_range: f64,
}

/// Llama 3's scaling of rotary frequencies (`rope_type: llama3` in Hugging Face's `config.json`): wavelengths above
/// `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, wavelengths below
/// `original_max_position_embeddings / high_freq_factor` are unchanged, and wavelengths in between are interpolated.
///
/// ```
/// // Llama 3.2
/// let scaling = models::RopeScaling {
///     factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192,
/// };
/// let config = models::ModelConfig { rope_scaling: Some(scaling), ..Default::default() };
/// config.validate()?;
/// # Ok::<(), models::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// The factor that stretches long wavelengths, at least 1.
    pub factor: f64,
    /// The divisor of the original context; wavelengths above the quotient are stretched. Less than `high_freq_factor`.
    pub low_freq_factor: f64,
    /// The divisor of the original context; wavelengths below the quotient are unchanged.
    pub high_freq_factor: f64,
    /// The context of pre-training, in tokens.
    pub original_max_position_embeddings: usize,
}

impl ModelConfig {
    /// Returns D, the width of a head: `head_dim`, or `hidden_size / num_attention_heads` if it is not set.
    ///
    /// The query projection has A x D columns, the key and value projections K x D each; with `head_dim` set, A x D may differ from H.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with the key, the valid values and the value found.
    pub fn validate(&self) -> Result<()> {
        // Limits are far above trainable sizes and far below sizes that overflow an allocation.
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
        match self.head_dim {
            Some(width) => check(
                (2..=1 << 12).contains(&width) && width.is_multiple_of(2),
                "model.head_dim",
                "an even number between 2 and 4096 (rotary positions turn pairs)",
                width,
            )?,
            None => check(
                self.hidden_size.is_multiple_of(heads) && self.head_dim().is_multiple_of(2),
                "model.hidden_size",
                "an even multiple of num_attention_heads (rotary positions turn pairs), or a head_dim beside it",
                format!("{} for {heads} heads", self.hidden_size),
            )?,
        }
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
        if let Some(pad) = self.pad_token_id {
            check(pad < self.vocab_size, "model.pad_token_id", "a token below model.vocab_size", pad)?;
        }
        if let Some(scaling) = self.rope_scaling {
            let RopeScaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } = scaling;
            let ordered = low_freq_factor > 0.0 && high_freq_factor > low_freq_factor && high_freq_factor.is_finite();
            check(
                factor.is_finite() && factor >= 1.0 && ordered && original_max_position_embeddings > 0,
                "model.rope_scaling",
                "factor >= 1, 0 < low_freq_factor < high_freq_factor, and an original_max_position_embeddings above 0",
                format!("{scaling:?}"),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_dim_is_independent_of_hidden_size() {
        // A hidden size that is not a multiple of the heads needs `head_dim`.
        let odd = ModelConfig { hidden_size: 50, ..ModelConfig::default() };
        let text = odd.validate().unwrap_err().to_string();
        assert!(text.contains("model.hidden_size") && text.contains("50 for 4 heads"), "{text}");
        let with = |width| ModelConfig { head_dim: Some(width), ..odd.clone() };
        with(12).validate().unwrap();
        assert_eq!(with(12).head_dim(), 12);
        for width in [0, 13, 1 << 20] {
            let text = with(width).validate().unwrap_err().to_string();
            assert!(text.contains("model.head_dim"), "{text}");
        }
    }
}
