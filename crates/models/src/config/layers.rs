//! The layers of a decoder: their specifications, heads, experts and repetition.

use super::ModelConfig;
use crate::experts::Experts;
use crate::layer::{AttentionHeads, LayerSpec, Mixer};
use crate::linear_attention::LinearAttention;

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

    /// Returns the sizes of the Gated DeltaNet of layer `index`; `None` for a layer with attention.
    pub fn linear_attention_of(&self, index: usize) -> Option<LinearAttention> {
        self.linear_attention.filter(|_| self.layer(index).mixer == Mixer::GatedDeltaNet)
    }

    /// Returns the number of layers with a Gated DeltaNet.
    pub fn linear_attention_layers(&self) -> usize {
        self.num_hidden_layers - self.attention_layers().count()
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
