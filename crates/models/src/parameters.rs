//! The tensors of a configuration, by the names of `transformers`.

use crate::config::ModelConfig;

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

/// The name of the embedding matrix, which is also the head of a tied model.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the head of an untied model.
pub(crate) const HEAD: &str = "lm_head.weight";

impl ModelConfig {
    /// Returns every tensor of the model in layer order; a tied head is not listed.
    ///
    /// Legend: V vocabulary, H residual stream, I MLP, A query heads, K key/value heads, D width of a head.
    ///
    /// # Shapes
    /// `model.embed_tokens.weight` and `lm_head.weight` `[V, H]`, `q_proj` `[A D, H]`, `k_proj` and `v_proj` `[K D, H]`,
    /// `o_proj` `[H, A D]`, `gate_proj` and `up_proj` `[I, H]`, `down_proj` `[H, I]`, `q_norm` and `k_norm` `[D]`, other
    /// norms `[H]`; biases are as long as their matrix has rows.
    ///
    /// ```
    /// let config = models::ModelConfig { tie_word_embeddings: true, ..Default::default() };
    /// let parameters = config.parameters();
    /// assert_eq!(parameters[0].name, "model.embed_tokens.weight");
    /// assert!(parameters.iter().all(|parameter| parameter.name != "lm_head.weight"));
    /// assert_eq!(config.parameter_count(), parameters.iter().map(|parameter| parameter.len() as u64).sum::<u64>());
    /// ```
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut list = Vec::new();
        let mut add = |name: String, shape: &[usize]| list.push(Parameter { name, shape: shape.to_vec() });
        let (vocabulary, hidden) = (self.vocab_size, self.hidden_size);
        add(EMBEDDING.into(), &[vocabulary, hidden]);
        for layer in 0..self.num_hidden_layers {
            let prefix = format!("model.layers.{layer}");
            add(format!("{prefix}.input_layernorm.weight"), &[hidden]);
            for matrix in self.layer_matrices() {
                let path = format!("{prefix}.{}", matrix.name);
                if self.attention_bias && matrix.biased {
                    add(format!("{path}.bias"), &[matrix.output]);
                }
                add(format!("{path}.weight"), &[matrix.output, matrix.input]);
            }
            if self.qk_norm {
                add(format!("{prefix}.self_attn.q_norm.weight"), &[self.head_dim()]);
                add(format!("{prefix}.self_attn.k_norm.weight"), &[self.head_dim()]);
            }
            add(format!("{prefix}.post_attention_layernorm.weight"), &[hidden]);
        }
        add("model.norm.weight".into(), &[hidden]);
        if !self.tie_word_embeddings {
            add(HEAD.into(), &[vocabulary, hidden]);
        }
        list
    }

    /// Returns the number of weights of the model; a tied head is not counted.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(|parameter| parameter.shape.iter().map(|&n| n as u64).product::<u64>()).sum()
    }

    /// Returns the seven matrices of a layer.
    pub fn layer_matrices(&self) -> [LayerMatrix; 7] {
        let (hidden, wide) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads * self.head_dim();
        let keys = self.num_key_value_heads * self.head_dim();
        let of = |name, output, input, biased| LayerMatrix { name, output, input, biased };
        [
            of("self_attn.q_proj", queries, hidden, true),
            of("self_attn.k_proj", keys, hidden, true),
            of("self_attn.v_proj", keys, hidden, true),
            of("self_attn.o_proj", hidden, queries, false),
            of("mlp.gate_proj", wide, hidden, false),
            of("mlp.up_proj", wide, hidden, false),
            of("mlp.down_proj", hidden, wide, false),
        ]
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
    /// `true` if `attention_bias` adds a bias.
    pub biased: bool,
}
