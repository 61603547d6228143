//! The tensors of a configuration, by the names of `transformers`.

mod axis;
mod role;
mod table;

pub use axis::Axis;
pub use role::{Matrix, Role};
pub use table::{Initial, PARAMETERS, ParameterSpec};

use crate::config::ModelConfig;
use crate::layer::LayerSpec;

/// The name and shape of a model's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name in `transformers`, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The sizes of the dimensions, outermost first; a matrix is `[out, in]`, as in torch's `nn.Linear`.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `true` if the tensor has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelConfig {
    /// Returns every tensor of the model in layer order; a tied head is not listed.
    ///
    /// Legend: V vocabulary, H residual stream, I MLP, A query heads, K key/value heads, D width of a head.
    ///
    /// # Shapes
    /// `model.embed_tokens.weight` and `lm_head.weight` `[V, H]`, `q_proj` `[A D, H]`, `k_proj` and `v_proj` `[K D, H]`,
    /// `o_proj` `[H, A D]`, `gate_proj` and `up_proj` `[I, H]`, `down_proj` `[H, I]`, or, fused, `qkv_proj` `[(A + 2K) D, H]` and
    /// `gate_up_proj` `[2I, H]`; `q_norm` and `k_norm` `[D]`, or `[A D]` and `[K D]` over all heads, other norms `[H]`; biases are as
    /// long as their matrix has rows; `self_attn.sinks` `[A]`; `layer_scalar` `[1]`. A layer may have its own D and K. With
    /// `attention_output_gate`, `q_proj` is `[2 A D, H]`: for each head the query, then its gate. [`Experts`](crate::Experts) have a router
    /// `[E, H]` and, for each expert, `gate_proj`, `up_proj` and `down_proj`. A layer with a Gated DeltaNet
    /// ([`LinearAttention`](crate::LinearAttention)) has, instead of `self_attn`, `linear_attn`
    /// with `in_proj_qkv` `[C, H]`, `in_proj_z` `[Hv Dv, H]`, `in_proj_b` and `in_proj_a` `[Hv, H]`, `out_proj` `[H, Hv Dv]`, `conv1d`
    /// `[C, 1, L]`, `A_log` and `dt_bias` `[Hv]`, and `norm` `[Dv]`.
    ///
    /// ```
    /// let config = grpo_models::ModelConfig { tie_word_embeddings: true, ..Default::default() };
    /// let parameters = config.parameters();
    /// assert_eq!(parameters[0].name, "model.embed_tokens.weight");
    /// assert!(parameters.iter().all(|parameter| parameter.name != "lm_head.weight"));
    /// assert_eq!(config.parameter_count(), parameters.iter().map(|parameter| parameter.len() as u64).sum::<u64>());
    /// ```
    pub fn parameters(&self) -> Vec<Parameter> {
        self.tensors().map(|(.., parameter)| parameter).collect()
    }

    /// Iterates over the tensors of [`ModelConfig::parameters`] with their rows of the table and their layers; the layer is 0 for a tensor that is
    /// not of layers.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static ParameterSpec, usize, Parameter)> {
        let tensors = move |row: &'static ParameterSpec, layer: usize| {
            let (spec, count) = (self.layer(layer), self.experts.as_ref().map_or(0, |experts| experts.num_experts));
            let experts = if row.is_per_expert() { count } else { 1 };
            let parameter =
                move |expert| Parameter { name: row.name(layer, expert), shape: row.tensor_shape(self, spec) };
            (0..experts).map(move |expert| (row, layer, parameter(expert)))
        };
        let is_first = |row: &&ParameterSpec| row.role == Role::EmbedTokens;
        let first = ParameterSpec::of_model(self).filter(is_first).map(|row| (row, 0));
        let last = ParameterSpec::of_model(self).filter(move |row| !is_first(row)).map(|row| (row, 0));
        let of_layer = |layer| ParameterSpec::of_layer(self, self.layer(layer)).map(move |row| (row, layer));
        let layers = (0..self.num_hidden_layers).flat_map(of_layer);
        first.chain(layers).chain(last).flat_map(move |(row, layer)| tensors(row, layer))
    }

    /// Returns the number of weights of the model; a tied head is not counted.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(|parameter| parameter.shape.iter().map(|&n| n as u64).product::<u64>()).sum()
    }

    /// Returns the projections of layer `index`, without experts. Attention has four matrices, three if values are keys, or two with
    /// `fused_projections`; a Gated DeltaNet has five. The MLP, or the shared expert, has three, or two with `fused_projections`.
    pub fn layer_matrices(&self, index: usize) -> Vec<LayerMatrix> {
        let layer = self.layer(index);
        let rows: Vec<&ParameterSpec> = ParameterSpec::of_layer(self, layer).collect();
        let matrix = |row: &&ParameterSpec| {
            let (name, shape) = (row.module(), row.shape(self, layer));
            let is_biased = rows.iter().any(|other| other.path.strip_suffix(".bias") == Some(name));
            LayerMatrix { name, output: shape[0], input: shape[1], biased: is_biased }
        };
        rows.iter().filter(|row| row.initial == Initial::Linear).map(matrix).collect()
    }

    /// Returns the sizes of the norms of queries and of keys of a layer.
    pub fn qk_norm_sizes(&self, layer: LayerSpec) -> [usize; 2] {
        let heads = self.heads(layer);
        if self.qk_norm_over_heads { [heads.query_columns(), heads.key_columns()] } else { [heads.width; 2] }
    }
}

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerMatrix {
    /// The path within the layer, such as `self_attn.q_proj`.
    pub name: &'static str,
    /// The number of rows.
    pub output: usize,
    /// The number of columns.
    pub input: usize,
    /// `true` if it has a bias.
    pub biased: bool,
}
