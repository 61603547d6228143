//! Differences between decoders and between the layers of one decoder, as data.

use crate::config::ModelConfig;
use crate::experts::Experts;
use serde::{Deserialize, Serialize};

/// The token mixer of a layer, its attention window, rotary embedding and heads: an entry of [`ModelConfig::layers`].
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
    /// A Gated DeltaNet (arXiv 2412.06464), whose sizes are [`ModelConfig::linear_attention`].
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

impl ModelConfig {
    /// Returns the specification of layer `index`.
    pub fn layer(&self, index: usize) -> LayerSpec {
        if self.layers.is_empty() { LayerSpec::default() } else { self.layers[index % self.layers.len()] }
    }

    /// Returns the specifications that repeat from the first layer on, at least one.
    pub fn period(&self) -> Vec<LayerSpec> {
        (0..self.layers.len().clamp(1, self.num_hidden_layers.max(1))).map(|index| self.layer(index)).collect()
    }

    /// Returns the number of first layers that do not repeat, and the number of layers that repeat after them, at least one. The first layers
    /// have equal specifications.
    ///
    /// ```
    /// use grpo_models::{LayerSpec, ModelConfig};
    ///
    /// let dense = LayerSpec { dense_mlp: true, ..LayerSpec::default() };
    /// let layers = vec![dense, dense, LayerSpec::default(), LayerSpec::default(), LayerSpec::default()];
    /// assert_eq!(ModelConfig { num_hidden_layers: 5, layers, ..ModelConfig::default() }.repetition(), (2, 1));
    /// ```
    pub fn repetition(&self) -> (usize, usize) {
        let layers: Vec<LayerSpec> = (0..self.num_hidden_layers).map(|index| self.layer(index)).collect();
        let period = self.period().len();
        let lead = layers.iter().take_while(|layer| Some(*layer) == layers.first()).count();
        let rest = shortest_period(&layers[lead..]).max(1);
        if lead < layers.len() && lead + rest < period { (lead, rest) } else { (0, period) }
    }

    /// Returns the experts of layer `index`; `None` if it has one MLP.
    pub fn experts_of(&self, index: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|_| !self.layer(index).dense_mlp)
    }

    /// Returns the number of layers with experts before layer `end`.
    pub fn routers_before(&self, end: usize) -> usize {
        (0..end).filter(|index| self.experts_of(*index).is_some()).count()
    }

    /// Returns the number of layers with experts.
    pub fn routers(&self) -> usize {
        self.routers_before(self.num_hidden_layers)
    }

    /// Returns the attention heads of a layer.
    ///
    /// ```
    /// use grpo_models::{AttentionHeads, LayerSpec, ModelConfig};
    ///
    /// let wide = LayerSpec { head_dim: Some(32), ..LayerSpec::default() };
    /// assert_eq!(ModelConfig::default().heads(wide), AttentionHeads { query: 4, key_value: 2, width: 32 });
    /// ```
    pub fn heads(&self, layer: LayerSpec) -> AttentionHeads {
        AttentionHeads {
            query: self.num_attention_heads,
            key_value: layer.num_key_value_heads.unwrap_or(self.num_key_value_heads),
            width: layer.head_dim.unwrap_or_else(|| self.head_dim()),
        }
    }

    /// Returns the specification of every layer with attention, from the first on.
    pub fn attention_layers(&self) -> impl Iterator<Item = LayerSpec> {
        let layers = (0..self.num_hidden_layers).map(|index| self.layer(index));
        layers.filter(|layer| layer.mixer == Mixer::Attention)
    }

    /// Returns the attention heads of every layer with attention, from the first on.
    pub fn heads_of_layers(&self) -> impl Iterator<Item = AttentionHeads> {
        self.attention_layers().map(|layer| self.heads(layer))
    }

    /// Returns the same model with every value that has a default spelled out, for comparisons.
    pub(crate) fn explicit(&self) -> Self {
        let (width, keys) = (self.head_dim(), self.num_key_value_heads);
        let layer = |index| {
            let layer = self.layer(index);
            LayerSpec {
                head_dim: layer.head_dim.filter(|own| *own != width),
                num_key_value_heads: layer.num_key_value_heads.filter(|own| *own != keys),
                ..layer
            }
        };
        let layers = (0..self.num_hidden_layers).map(layer).collect();
        Self { head_dim: Some(self.head_dim()), layers: Self::shortest(layers), ..self.clone() }
    }

    /// Returns the shortest list that, repeated, gives these layers; an empty one if all are the default.
    pub(crate) fn shortest(layers: Vec<LayerSpec>) -> Vec<LayerSpec> {
        let period = layers[..shortest_period(&layers)].to_vec();
        if period == [LayerSpec::default()] { Vec::new() } else { period }
    }
}

/// Returns the smallest number of first layers that, repeated, give all of them; 0 if there are none.
fn shortest_period(layers: &[LayerSpec]) -> usize {
    let repeats = |length: &usize| layers.iter().enumerate().all(|(i, layer)| *layer == layers[i % length]);
    (1..=layers.len()).find(repeats).unwrap_or(0)
}
