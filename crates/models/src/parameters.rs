//! The tensors of a configuration, by the names of `transformers`.

use crate::config::ModelConfig;
use crate::layer::LayerSpec;
use crate::names::{EMBEDDING, HEAD};

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

/// The name within a layer of the factor of its output.
pub(crate) const LAYER_SCALAR: &str = "layer_scalar";

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
        let mut list = Vec::new();
        let add = |list: &mut Vec<Parameter>, name: String, shape: &[usize]| {
            list.push(Parameter { name, shape: shape.to_vec() });
        };
        let (vocabulary, hidden) = (self.vocab_size, self.hidden_size);
        add(&mut list, EMBEDDING.into(), &[vocabulary, hidden]);
        for layer in 0..self.num_hidden_layers {
            let prefix = format!("model.layers.{layer}");
            let [before, after, before_mlp, after_mlp] = self.norm_placement.names();
            let norm = |name: Option<&str>, list: &mut Vec<Parameter>| {
                list.extend(
                    name.map(|name| Parameter { name: format!("{prefix}.{name}.weight"), shape: vec![hidden] }),
                );
            };
            norm(before, &mut list);
            let (recurrent, spec) = (self.linear_attention_of(layer), self.layer(layer));
            for matrix in self.layer_matrices(layer) {
                let path = format!("{prefix}.{}", matrix.name);
                if matrix.biased {
                    add(&mut list, format!("{path}.bias"), &[matrix.output]);
                }
                add(&mut list, format!("{path}.weight"), &[matrix.output, matrix.input]);
            }
            list.extend(self.experts_of(layer).iter().flat_map(|experts| experts.parameters(&prefix, hidden)));
            list.extend(recurrent.iter().flat_map(|of| of.parameters(&prefix)));
            if self.attention_sinks && recurrent.is_none() {
                add(&mut list, format!("{prefix}.self_attn.sinks"), &[self.num_attention_heads]);
            }
            if self.qk_norm && recurrent.is_none() {
                let [queries, keys] = self.qk_norm_sizes(spec);
                add(&mut list, format!("{prefix}.self_attn.q_norm.weight"), &[queries]);
                add(&mut list, format!("{prefix}.self_attn.k_norm.weight"), &[keys]);
            }
            [after, before_mlp, after_mlp].into_iter().for_each(|name| norm(name, &mut list));
            if self.layer_scalars {
                add(&mut list, format!("{prefix}.{LAYER_SCALAR}"), &[1]);
            }
        }
        add(&mut list, "model.norm.weight".into(), &[hidden]);
        if !self.tie_word_embeddings {
            add(&mut list, HEAD.into(), &[vocabulary, hidden]);
        }
        list
    }

    /// Returns the number of weights of the model; a tied head is not counted.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(|parameter| parameter.shape.iter().map(|&n| n as u64).product::<u64>()).sum()
    }

    /// Returns the matrices of layer `index`: four of attention, or three if its values are its keys, or five of a Gated DeltaNet, and three
    /// of the MLP; with `fused_projections` two and two; in a layer with experts those of the shared
    /// expert instead.
    pub fn layer_matrices(&self, index: usize) -> Vec<LayerMatrix> {
        let (hidden, wide) = (self.hidden_size, self.intermediate_size);
        let layer = self.layer(index);
        let (queries, keys) = (self.heads(layer).query_columns(), self.heads(layer).key_columns());
        let of = |name, output, input, biased| LayerMatrix { name, output, input, biased };
        let (bias, output_bias) = (self.attention_bias, self.attention_output_bias);
        if self.fused_projections {
            return vec![
                of("self_attn.qkv_proj", queries + 2 * keys, hidden, bias),
                of("self_attn.o_proj", hidden, queries, false),
                of("mlp.gate_up_proj", 2 * wide, hidden, false),
                of("mlp.down_proj", hidden, wide, false),
            ];
        }
        let gates = if self.attention_output_gate { queries } else { 0 };
        let mut matrices = match self.linear_attention_of(index) {
            Some(of) => of.matrices(hidden),
            None => vec![
                of("self_attn.q_proj", queries + gates, hidden, bias),
                of("self_attn.k_proj", keys, hidden, bias),
                of("self_attn.v_proj", keys, hidden, bias),
                of("self_attn.o_proj", hidden, queries, output_bias),
            ],
        };
        matrices.retain(|matrix| !(layer.keys_are_values && matrix.name == "self_attn.v_proj"));
        match self.experts_of(index) {
            Some(experts) => matrices.extend(experts.shared_expert.iter().flat_map(|shared| shared.matrices(hidden))),
            None => matrices.extend([
                of("mlp.gate_proj", wide, hidden, false),
                of("mlp.up_proj", wide, hidden, false),
                of("mlp.down_proj", hidden, wide, false),
            ]),
        }
        matrices
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
