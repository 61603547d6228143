//! The configuration of a decoder, with the field names of Hugging Face's `config.json`.

mod layers;

use crate::error::{Result, between, check};
use crate::experts::Experts;
use crate::layer::{Activation, LayerRope, LayerSpec, Mixer, NormPlacement};
use crate::linear_attention::LinearAttention;
use crate::tokenizer::CharTokenizer;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::ops::RangeInclusive;

/// The shape and initialisation of a decoder: the section `model` of a run's configuration.
///
/// ```
/// let qwen3 = grpo_models::ModelConfig { hidden_size: 48, head_dim: Some(32), ..Default::default() };
/// qwen3.validate()?;
/// assert_eq!(qwen3.head_dim(), 32);
/// assert_eq!(grpo_models::ModelConfig::default().head_dim(), 64 / 4);
/// # Ok::<(), grpo_models::Error>(())
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
    /// I, the width of the MLP; layers with `experts` have none of this width.
    #[default(192)]
    pub intermediate_size: usize,
    /// The experts of layers without `dense_mlp`; `None` is one MLP in every layer.
    pub experts: Option<Experts>,
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
    /// The token mixers, attention windows, rotary embeddings and heads of the layers, repeated from the first layer on; an empty list is full
    /// attention with rotary embeddings in every layer.
    pub layers: Vec<LayerSpec>,
    /// The sizes of layers with `mixer: gated_delta_net`; `None` if there are none.
    pub linear_attention: Option<LinearAttention>,
    /// The base of the rotary frequencies.
    #[default(10_000.0)]
    pub rope_theta: f64,
    /// The base of the rotary frequencies of layers with `rope: local`, which are not scaled; `None` is `rope_theta`.
    pub rope_local_theta: Option<f64>,
    /// The scaling of rotary frequencies for contexts longer than in pre-training; `None` leaves them unscaled.
    pub rope_scaling: Option<RopeScaling>,
    /// The share of a head's columns that the rotary embedding rotates, from the first column on.
    #[default(1.0)]
    pub partial_rotary_factor: f64,
    /// `true` if the query, key and value projections have biases, as in Qwen2; Qwen3 and Llama 3 have none.
    #[default(true)]
    pub attention_bias: bool,
    /// `true` if the output projection of attention has a bias, as in gpt-oss.
    pub attention_output_bias: bool,
    /// `true` if every query head has a sink, a learned logit in the denominator of its softmax, as in gpt-oss.
    pub attention_sinks: bool,
    /// `true` if the output of every query head is multiplied by the sigmoid of a gate before the output projection, as in Qwen3.5. q_proj
    /// then has 2 D rows for each head: the query, and then its gate.
    pub attention_output_gate: bool,
    /// `true` if every query and key head is normalised (RMSNorm over D with its own weights) before the rotary embedding, as in Qwen3.
    pub qk_norm: bool,
    /// `true` if one norm goes over the columns of all query heads, and another over the columns of all key heads, as in OLMo 2; needs
    /// `qk_norm`.
    pub qk_norm_over_heads: bool,
    /// `true` if every value head is normalised (RMSNorm over D without weights), as in Gemma 4.
    pub value_norm: bool,
    /// `true` if q_proj, k_proj and v_proj are one matrix in files, and gate_proj and up_proj are one matrix, as in Phi-3.
    pub fused_projections: bool,
    /// The scale of attention scores; `None` is 1 / sqrt(head_dim).
    pub attention_multiplier: Option<f64>,
    /// The activation of the MLP's gate.
    pub hidden_act: Activation,
    /// Which of the inputs and outputs of attention and MLP are normalised.
    pub norm_placement: NormPlacement,
    /// `true` if norms multiply by 1 + weight instead of the weight, as in Gemma 3; the norm inside a Gated DeltaNet never does.
    pub zero_centered_norms: bool,
    /// `true` if the output of every layer is multiplied by the layer's `layer_scalar`, which is never trained, as in Gemma 4.
    pub layer_scalars: bool,
    /// The factor of token embeddings.
    #[default(1.0)]
    pub embedding_multiplier: f64,
    /// The factor of the outputs of attention and MLP before they are added to the residual stream.
    #[default(1.0)]
    pub residual_multiplier: f64,
    /// The divisor of logits. Hidden states after the final norm are divided by it.
    #[default(1.0)]
    pub logits_scaling: f64,
    /// The softcap of logits, `cap * tanh(logits / cap)`; `None` is none.
    pub final_logit_softcapping: Option<f64>,
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

/// The scaling of rotary frequencies, with the field names of `rope_scaling` and `rope_parameters` in Hugging Face's `config.json`.
///
/// ```
/// use grpo_models::RopeScaling;
///
/// // Llama 3.2
/// let scaling = RopeScaling { factor: 32.0, original_max_position_embeddings: 8192, ..RopeScaling::default() };
/// let config = grpo_models::ModelConfig { rope_scaling: Some(scaling), ..Default::default() };
/// config.validate()?;
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeScaling {
    /// The method.
    pub rope_type: RopeType,
    /// The factor that stretches long wavelengths, at least 1; `longrope` does not use it.
    #[default(1.0)]
    pub factor: f64,
    /// The divisor of the original context; wavelengths above the quotient are stretched. Less than `high_freq_factor` (`llama3`).
    #[default(1.0)]
    pub low_freq_factor: f64,
    /// The divisor of the original context; wavelengths below the quotient are unchanged (`llama3`).
    #[default(4.0)]
    pub high_freq_factor: f64,
    /// The context of pre-training, in tokens; `linear` and `longrope` do not use it.
    #[default(8192)]
    pub original_max_position_embeddings: usize,
    /// The number of rotations over the original context above which a wavelength is unchanged (`yarn`).
    #[default(32.0)]
    pub beta_fast: f64,
    /// The number of rotations over the original context below which a wavelength is stretched (`yarn`).
    #[default(1.0)]
    pub beta_slow: f64,
    /// `true` if the bounds of the interpolated pairs are whole numbers (`yarn`).
    #[default(true)]
    pub truncate: bool,
    /// The factor of cosines and sines (`yarn`, `longrope`).
    #[default(1.0)]
    pub attention_factor: f64,
    /// The divisor of each frequency (`longrope`).
    pub short_factor: Vec<f64>,
    /// The share of a head's pairs of columns that are rotated (`proportional`).
    #[default(1.0)]
    pub partial_rotary_factor: f64,
    /// The strength of the growth of queries beyond the original context, as in Ministral 3 (`yarn`); `None` is no growth.
    pub llama_4_scaling_beta: Option<f64>,
}

/// A method to scale rotary frequencies, by its name in `transformers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeType {
    /// Llama 3: wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, wavelengths below
    /// `original_max_position_embeddings / high_freq_factor` are unchanged, and wavelengths in between are interpolated.
    #[default]
    Llama3,
    /// All wavelengths are stretched by `factor`.
    Linear,
    /// YaRN (arXiv 2309.00071).
    Yarn,
    /// LongRoPE (arXiv 2402.13753) within the original context: frequencies are divided by `short_factor`.
    Longrope,
    /// Rotates the first `partial_rotary_factor` of a head's pairs of columns, with frequencies divided by `factor`, and not the other pairs,
    /// as in Gemma 4.
    Proportional,
}

impl RopeType {
    /// Returns the name in `transformers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama3 => "llama3",
            Self::Linear => "linear",
            Self::Yarn => "yarn",
            Self::Longrope => "longrope",
            Self::Proportional => "proportional",
        }
    }
}

/// The growth of queries with the position: a factor of `1 + beta log(1 + floor(position / original))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// The strength.
    pub beta: f64,
    /// The number of tokens of the original context.
    pub original: usize,
}

impl QueryScaling {
    /// Returns the factor of queries at `position`.
    pub fn at(self, position: usize) -> f64 {
        1.0 + self.beta * (1.0 + (position / self.original.max(1)) as f64).ln()
    }
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
        self.validate_sizes()?;
        self.validate_numbers()?;
        if let Some(pad) = self.pad_token_id {
            check(pad < self.vocab_size, "model.pad_token_id", "a token below model.vocab_size", pad)?;
        }
        self.validate_layers()?;
        if let Some(experts) = &self.experts {
            experts.validate(self.num_hidden_layers)?;
            check(!self.fused_projections, "model.fused_projections", "false beside model.experts", "true")?;
        }
        match &self.rope_scaling {
            Some(scaling) => scaling.validate(self),
            None => Ok(()),
        }
    }

    /// Checks the sizes that all families have, before anything is allocated by them.
    pub(crate) fn validate_sizes(&self) -> Result<()> {
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
        )
    }

    /// Checks numbers against ranges that are far wider than in real models.
    fn validate_numbers(&self) -> Result<()> {
        const THETA: RangeInclusive<f64> = 1.0..=1e12;
        for (key, value, range) in [
            ("model.rope_theta", self.rope_theta, THETA),
            ("model.rope_local_theta", self.rope_local_theta.unwrap_or(1.0), THETA),
            ("model.rms_norm_eps", self.rms_norm_eps, 1e-12..=0.1),
            ("model.initializer_range", self.initializer_range, 1e-9..=100.0),
            ("model.attention_multiplier", self.attention_multiplier.unwrap_or(1.0), FACTOR),
            ("model.embedding_multiplier", self.embedding_multiplier, FACTOR),
            ("model.residual_multiplier", self.residual_multiplier, FACTOR),
            ("model.logits_scaling", self.logits_scaling, FACTOR),
            ("model.final_logit_softcapping", self.final_logit_softcapping.unwrap_or(1.0), 0.1..=1e6),
        ] {
            check(range.contains(&value), key, &between(&range), value)?;
        }
        Ok(())
    }

    fn validate_layers(&self) -> Result<()> {
        for layer in &self.layers {
            let is_valid = layer.sliding_window.is_none_or(|window| (1..=1 << 20).contains(&window));
            check(is_valid, "model.layers", "a sliding_window between 1 and 1048576, or none", format!("{layer:?}"))?;
        }
        let is_recurrent = |layer: &&LayerSpec| layer.mixer == Mixer::GatedDeltaNet;
        for layer in self.layers.iter().filter(is_recurrent) {
            let expected = "rope: none, and neither sliding_window nor heads, with mixer: gated_delta_net";
            check(*layer == LayerSpec::GATED_DELTA_NET, "model.layers", expected, format!("{layer:?}"))?;
        }
        check(
            self.linear_attention.is_some() == self.layers.iter().any(|layer| is_recurrent(&layer)),
            "model.linear_attention",
            "sizes if, and only if, a layer of model.layers has mixer: gated_delta_net",
            format!("{:?} for layers {:?}", self.linear_attention, self.layers),
        )?;
        check(
            !(self.fused_projections && self.linear_attention.is_some()),
            "model.fused_projections",
            "false with model.linear_attention",
            "true",
        )?;
        check(
            (self.layers.is_empty() || self.experts.is_none() || self.routers() > 0)
                && (self.experts.is_some() || !self.layers.iter().any(|layer| layer.dense_mlp)),
            "model.layers",
            "dense_mlp in some layers of a model with experts, or in none",
            format!("{:?} with experts {:?}", self.layers, self.experts),
        )?;
        self.linear_attention.iter().try_for_each(LinearAttention::validate)?;
        self.layers.iter().try_for_each(|layer| self.validate_heads(*layer))?;
        let is_local = |layer: &LayerSpec| layer.rope == LayerRope::Local;
        check(
            self.rope_local_theta.is_none() || self.layers.iter().any(is_local),
            "model.rope_local_theta",
            "a layer with `rope: local` in model.layers, or no rope_local_theta",
            format!("{:?}", self.layers),
        )?;
        let width = self.rotary_dim();
        let share = self.rope_scaling.as_ref().map_or(1.0, |scaling| scaling.partial_rotary_factor);
        check(
            share == 1.0 || self.partial_rotary_factor == 1.0,
            "model.partial_rotary_factor",
            "1 beside the partial_rotary_factor of rope_scaling",
            self.partial_rotary_factor,
        )?;
        check(
            (0.0..=1.0).contains(&self.partial_rotary_factor) && width >= 2 && width.is_multiple_of(2),
            "model.partial_rotary_factor",
            "at most 1, so that an even number of columns of a head, at least 2, is rotated",
            format!("{} of {} columns", self.partial_rotary_factor, self.head_dim()),
        )?;
        check(
            self.qk_norm || !self.qk_norm_over_heads,
            "model.qk_norm_over_heads",
            "qk_norm: true beside it",
            "qk_norm: false",
        )?;
        check(
            !(self.fused_projections
                && (self.attention_bias || self.attention_output_bias || self.qk_norm || self.attention_output_gate)),
            "model.fused_projections",
            "attention_bias: false, attention_output_bias: false, qk_norm: false and attention_output_gate: false beside it",
            format!(
                "attention_bias: {}, attention_output_bias: {}, qk_norm: {}, attention_output_gate: {}",
                self.attention_bias, self.attention_output_bias, self.qk_norm, self.attention_output_gate
            ),
        )
    }

    /// Checks the heads of a layer.
    fn validate_heads(&self, layer: LayerSpec) -> Result<()> {
        let heads = self.heads(layer);
        let alike = |other: &&LayerSpec| other.rope == layer.rope && self.heads(**other).width != heads.width;
        check(
            (2..=1 << 12).contains(&heads.width) && heads.width.is_multiple_of(2),
            "model.layers",
            "a head_dim that is an even number between 2 and 4096, or none",
            format!("{layer:?}"),
        )?;
        check(
            heads.key_value > 0 && heads.query.is_multiple_of(heads.key_value),
            "model.layers",
            &format!("a num_key_value_heads that divides num_attention_heads, {}, or none", heads.query),
            format!("{layer:?}"),
        )?;
        check(
            self.layers.iter().find(alike).is_none() || layer.rope == LayerRope::None,
            "model.layers",
            "one head_dim in all layers with the same rope",
            format!("{:?}", self.layers),
        )?;
        check(
            !(layer.keys_are_values && (self.fused_projections || self.attention_bias || self.attention_output_gate)),
            "model.layers",
            "keys_are_values: false beside fused_projections, attention_bias or attention_output_gate",
            format!("{layer:?}"),
        )
    }
}

/// The range of factors.
const FACTOR: RangeInclusive<f64> = 1e-6..=1e6;

impl RopeScaling {
    fn validate(&self, model: &ModelConfig) -> Result<()> {
        let ordered = |low: f64, high: f64| low > 0.0 && high > low && FACTOR.contains(&high);
        let context = (1..=1 << 20).contains(&self.original_max_position_embeddings);
        let factor = (1.0..=*FACTOR.end()).contains(&self.factor);
        let positive = |value: f64| FACTOR.contains(&value);
        let (is_valid, expected) = match self.rope_type {
            RopeType::Llama3 => (
                factor && ordered(self.low_freq_factor, self.high_freq_factor) && context,
                "factor >= 1, 0 < low_freq_factor < high_freq_factor, and an original_max_position_embeddings between 1 and 1048576".to_owned(),
            ),
            RopeType::Linear | RopeType::Proportional => (factor, "factor >= 1".to_owned()),
            RopeType::Yarn => (
                factor && ordered(self.beta_slow, self.beta_fast) && context && model.rope_theta > 1.0,
                "factor >= 1, 0 < beta_slow < beta_fast, rope_theta > 1, and an original_max_position_embeddings between 1 and 1048576".to_owned(),
            ),
            RopeType::Longrope => {
                let pairs = model.rotary_dim() / 2;
                let is_valid = self.short_factor.len() == pairs && self.short_factor.iter().copied().all(positive);
                (is_valid, format!("a short_factor of {pairs} numbers above 0, one for each rotated pair of columns"))
            }
        };
        let is_proportional = self.rope_type == RopeType::Proportional;
        let share = self.partial_rotary_factor;
        let has_share = if is_proportional { share > 0.0 && share <= 1.0 } else { share == 1.0 };
        check(
            has_share,
            "model.rope_scaling",
            "a partial_rotary_factor above 0 and at most 1 with `proportional`, and 1 otherwise",
            share,
        )?;
        let is_yarn = self.rope_type == RopeType::Yarn;
        let grows = self.llama_4_scaling_beta.is_none_or(|beta| is_yarn && (0.0..=*FACTOR.end()).contains(&beta));
        check(
            is_valid && positive(self.attention_factor) && grows,
            "model.rope_scaling",
            &format!(
                "{expected}, an attention_factor above 0, none or, with `yarn`, a llama_4_scaling_beta of at least 0, and no number above \
                 {:?} or, but for 0, below {:?}",
                FACTOR.end(),
                FACTOR.start()
            ),
            format!("{self:?}"),
        )
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
