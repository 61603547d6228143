//! Differences between decoders and between the layers of one decoder, as data.

use serde::{Deserialize, Serialize};

/// The token mixer of a layer, its attention window, rotary embedding and heads: an entry of [`ModelConfig::layers`](crate::ModelConfig::layers).
///
/// ```
/// use grpo_models::{LayerRope, LayerSpec, ModelConfig};
///
/// // Gemma 3: five layers with a window and rotary frequencies of their own, then a layer with full attention.
/// let sliding = LayerSpec { sliding_window: Some(512), rope: LayerRope::Local, ..LayerSpec::default() };
/// let mut layers = vec![sliding; 5];
/// layers.push(LayerSpec::default());
/// let config = ModelConfig { layers, num_hidden_layers: 26, rope_local_theta: Some(1e4), rope_theta: 1e6, ..Default::default() };
/// config.validate()?;
/// assert_eq!((config.layer(4), config.layer(5), config.layer(6)), (sliding, LayerSpec::default(), sliding));
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerSpec {
    /// The token mixer.
    pub mixer: Mixer,
    /// The number of tokens that a token attends to: itself and the tokens before it. `None` is all of them.
    pub sliding_window: Option<usize>,
    /// The rotary embedding.
    pub rope: LayerRope,
    /// D, the width of a head of this layer; `None` is the model's.
    pub head_dim: Option<usize>,
    /// K, the number of key/value heads of this layer; `None` is the model's.
    pub num_key_value_heads: Option<usize>,
    /// `true` if the layer has no value projection: values are the keys before their norm and rotary embedding, as in Gemma 4.
    pub keys_are_values: bool,
    /// `true` if the layer of a model with `experts` has one MLP of `intermediate_size` instead of experts.
    pub dense_mlp: bool,
}

/// The attention heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionHeads {
    /// A, the number of query heads.
    pub query: usize,
    /// K, the number of key/value heads.
    pub key_value: usize,
    /// D, the width of a head.
    pub width: usize,
}

impl AttentionHeads {
    /// Returns A D, the number of columns of all query heads.
    pub fn query_columns(self) -> usize {
        self.query * self.width
    }

    /// Returns K D, the number of columns of all key heads.
    pub fn key_columns(self) -> usize {
        self.key_value * self.width
    }
}

impl LayerSpec {
    /// A layer with a Gated DeltaNet, which has neither a window nor a rotary embedding.
    pub const GATED_DELTA_NET: Self = Self {
        mixer: Mixer::GatedDeltaNet,
        sliding_window: None,
        rope: LayerRope::None,
        head_dim: None,
        num_key_value_heads: None,
        keys_are_values: false,
        dense_mlp: false,
    };
}

/// The token mixer of a layer: softmax attention or a Gated DeltaNet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixer {
    /// Softmax attention.
    #[default]
    Attention,
    /// A Gated DeltaNet (arXiv 2412.06464), whose sizes are [`ModelConfig::linear_attention`](crate::ModelConfig::linear_attention).
    GatedDeltaNet,
}

/// The rotary embedding of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerRope {
    /// The frequencies of `rope_theta` and `rope_scaling`.
    #[default]
    Global,
    /// The unscaled frequencies of `rope_local_theta`.
    Local,
    /// No rotary embedding (NoPE, arXiv 2305.19466).
    None,
}

/// The norms of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// The inputs of attention and MLP are normalised.
    #[default]
    Before,
    /// The outputs of attention and MLP are normalised before they are added to the residual stream, as in OLMo 2.
    After,
    /// Inputs and outputs are normalised, as in Gemma 3.
    Both,
}

impl NormPlacement {
    /// Returns the names in `transformers` of a layer's norms: before and after attention, before and after the MLP.
    ///
    /// ```
    /// let [before, after, ..] = grpo_models::NormPlacement::Before.names();
    /// assert_eq!((before, after), (Some("input_layernorm"), None));
    /// ```
    pub fn names(self) -> [Option<&'static str>; 4] {
        let (input, attention) = ("input_layernorm", "post_attention_layernorm");
        let (before_mlp, mlp) = ("pre_feedforward_layernorm", "post_feedforward_layernorm");
        match self {
            Self::Before => [Some(input), None, Some(attention), None],
            Self::After => [None, Some(attention), None, Some(mlp)],
            Self::Both => [Some(input), Some(attention), Some(before_mlp), Some(mlp)],
        }
    }
}

/// The activation of the gate of an MLP, `down(activation(gate(x)) * up(x))`, by its name in `transformers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// SiLU: the MLP is SwiGLU (arXiv 2002.05202).
    #[default]
    #[serde(rename = "silu")]
    Silu,
    /// GELU in its tanh approximation (arXiv 1606.08415): the MLP is GeGLU.
    #[serde(rename = "gelu_pytorch_tanh")]
    GeluTanh,
}

impl Activation {
    /// Returns the name in `transformers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_pytorch_tanh",
        }
    }
}
