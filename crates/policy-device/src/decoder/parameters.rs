//! The table of a decoder's parameters: shapes, logical axes, and the tensors of Hugging Face that they consist of.
//!
//! Legend: L layers, V vocabulary, H residual stream, I MLP, A query heads, K key/value heads, D width of a head.

use super::Matrix;
use models::ModelConfig;
use stablehlo::{Dtype, TensorType, Value};
use std::collections::BTreeMap;

/// What a parameter is to the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in Hugging Face's folders; `Parameter::hugging_face` has the names
pub enum Role {
    EmbedTokens,
    InputLayernorm,
    QProj,
    QBias,
    KProj,
    KBias,
    VProj,
    VBias,
    OProj,
    QNorm,
    KNorm,
    PostAttentionLayernorm,
    GateProj,
    UpProj,
    DownProj,
    Norm,
    LmHead,
    /// A of the adapter of a matrix.
    LoraA(Matrix),
    /// B of the adapter of a matrix.
    LoraB(Matrix),
    ValueHead,
    ValueHeadBias,
}

impl Role {
    /// Whether every layer has such a parameter.
    pub fn is_of_layers(self) -> bool {
        let head = Matrix::LmHead;
        !matches!(self, Self::EmbedTokens | Self::Norm | Self::LmHead | Self::ValueHead | Self::ValueHeadBias)
            && self != Self::LoraA(head)
            && self != Self::LoraB(head)
    }

    /// Whether it is a parameter of the model itself, and not of adapters or of a value head beside it.
    pub fn is_of_model(self) -> bool {
        !matches!(self, Self::LoraA(_) | Self::LoraB(_)) && !self.is_of_value_head()
    }

    /// Whether it is a parameter of the value head.
    pub fn is_of_value_head(self) -> bool {
        matches!(self, Self::ValueHead | Self::ValueHeadBias)
    }
}

/// What a dimension of a parameter, or of an activation, counts. A mesh of devices splits dimensions by these names
/// ([`AxisRules`](super::AxisRules)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Layers, L; never split.
    Layer,
    /// The residual stream, H.
    Embed,
    /// Query heads and their columns, A x D.
    Heads,
    /// Key/value heads and their columns, K x D.
    Kv,
    /// The columns of one head, D.
    HeadDim,
    /// The MLP, I.
    Mlp,
    /// The vocabulary, V.
    Vocab,
    /// The rank of an adapter.
    Rank,
    /// The one value of a state.
    Value,
    /// The rows of activations, B, or their tokens, N; no parameter has it.
    Batch,
    /// The tokens of a row, T; no parameter has it, and it is whole unless a table says otherwise.
    Length,
}

/// A parameter as it lies on a device: one tensor of Hugging Face, or the tensors of all layers one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// What it is to the decoder.
    pub role: Role,
    /// The sizes of its dimensions: `[L, ...]` for one of the layers. Matrices are `[out, in]`, as Hugging Face stores them.
    pub shape: Vec<usize>,
    /// What each dimension counts.
    pub axes: Vec<Axis>,
    /// A short name.
    pub(super) path: &'static str,
    /// The tensors that it consists of, each with its place in the stack.
    pub(super) tensors: Vec<(usize, String)>,
}

impl Parameter {
    /// Whether it has the tensors of all layers, one after the other.
    pub fn is_stacked(&self) -> bool {
        self.axes[0] == Axis::Layer
    }

    /// The names of the tensors of `transformers` that it consists of: one, or one per layer. Those of adapters have PEFT's names, and
    /// layers without the adapter none.
    pub fn hugging_face(&self) -> Vec<String> {
        self.tensors().map(|(_, name)| name.to_owned()).collect()
    }

    /// The same names, each with the layer whose tensor it is. What a stack has of other layers is zero.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &str)> {
        self.tensors.iter().map(|(layer, name)| (*layer, name.as_str()))
    }

    /// The number of weights.
    pub fn count(&self) -> usize {
        self.tensors.len() * self.tensor_shape().iter().product::<usize>()
    }

    /// Whether it consists of matrices, of which products take operands; norms and biases are vectors.
    pub fn has_matrices(&self) -> bool {
        self.tensor_shape().len() > 1
    }

    /// The number type in which programs take it of a model in `model`, f32 or bf16: that of the model's matrices. Norms, biases, adapters
    /// and value heads are f32 always.
    pub fn dtype(&self, model: Dtype) -> Dtype {
        if self.role.is_of_model() && self.has_matrices() { model } else { Dtype::F32 }
    }

    /// The shape of one of those tensors.
    pub fn tensor_shape(&self) -> &[usize] {
        if self.is_stacked() { &self.shape[1..] } else { &self.shape }
    }

    /// A short name for readers of programs.
    pub fn name(&self) -> &'static str {
        self.path
    }
}

/// The parameters of a decoder, in the order in which programs take them.
///
/// ```
/// use policy_device::decoder::{Axis, Role, parameters};
///
/// let table = parameters(&models::ModelConfig::default());
/// let gate = table.iter().find(|parameter| parameter.role == Role::GateProj).unwrap();
/// assert_eq!((&gate.shape[..], &gate.axes[..]), (&[2, 192, 64][..], &[Axis::Layer, Axis::Mlp, Axis::Embed][..]));
/// assert_eq!(gate.hugging_face()[1], "model.layers.1.mlp.gate_proj.weight");
/// ```
pub fn parameters(config: &ModelConfig) -> Vec<Parameter> {
    use Axis::{Embed, HeadDim, Heads, Kv, Layer, Mlp, Vocab};
    let size = |axis: &Axis| match axis {
        Layer => config.num_hidden_layers,
        Embed => config.hidden_size,
        Heads => config.num_attention_heads * config.head_dim(),
        Kv => config.num_key_value_heads * config.head_dim(),
        HeadDim => config.head_dim(),
        Mlp => config.intermediate_size,
        Vocab => config.vocab_size,
        Axis::Rank | Axis::Value | Axis::Batch | Axis::Length => unreachable!("no parameter of the model has it"),
    };
    let biased = |role: Role| matches!(role, Role::QBias | Role::KBias | Role::VBias);
    let normed = |role: Role| matches!(role, Role::QNorm | Role::KNorm);
    let all: [(Role, &'static str, &[Axis]); 17] = [
        (Role::EmbedTokens, "model.embed_tokens.weight", &[Vocab, Embed]),
        (Role::InputLayernorm, "input_layernorm.weight", &[Layer, Embed]),
        (Role::QProj, "self_attn.q_proj.weight", &[Layer, Heads, Embed]),
        (Role::QBias, "self_attn.q_proj.bias", &[Layer, Heads]),
        (Role::KProj, "self_attn.k_proj.weight", &[Layer, Kv, Embed]),
        (Role::KBias, "self_attn.k_proj.bias", &[Layer, Kv]),
        (Role::VProj, "self_attn.v_proj.weight", &[Layer, Kv, Embed]),
        (Role::VBias, "self_attn.v_proj.bias", &[Layer, Kv]),
        (Role::OProj, "self_attn.o_proj.weight", &[Layer, Embed, Heads]),
        (Role::QNorm, "self_attn.q_norm.weight", &[Layer, HeadDim]),
        (Role::KNorm, "self_attn.k_norm.weight", &[Layer, HeadDim]),
        (Role::PostAttentionLayernorm, "post_attention_layernorm.weight", &[Layer, Embed]),
        (Role::GateProj, "mlp.gate_proj.weight", &[Layer, Mlp, Embed]),
        (Role::UpProj, "mlp.up_proj.weight", &[Layer, Mlp, Embed]),
        (Role::DownProj, "mlp.down_proj.weight", &[Layer, Embed, Mlp]),
        (Role::Norm, "model.norm.weight", &[Embed]),
        (Role::LmHead, "lm_head.weight", &[Vocab, Embed]),
    ];
    all.into_iter()
        .filter(|(role, ..)| {
            (config.attention_bias || !biased(*role))
                && (config.qk_norm || !normed(*role))
                && (!config.tie_word_embeddings || *role != Role::LmHead)
        })
        .map(|(role, path, axes)| {
            let tensors = match role.is_of_layers() {
                true => {
                    (0..config.num_hidden_layers).map(|layer| (layer, format!("model.layers.{layer}.{path}"))).collect()
                }
                false => vec![(0, path.to_owned())],
            };
            Parameter { role, shape: axes.iter().map(size).collect(), axes: axes.to_vec(), path, tensors }
        })
        .collect()
}

/// The parameters of a decoder as values of a program: all of them, or those of one layer.
#[derive(Clone, Debug)]
pub struct ParameterValues {
    values: BTreeMap<Role, Value>,
    /// Whether the matrices of the model that products take are `[in, out]`.
    transposed: bool,
}

impl ParameterValues {
    /// Declares the parameters of `table` as the next arguments of a program, of a model in `dtype` ([`Parameter::dtype`]).
    pub fn arguments(builder: &stablehlo::Builder, table: &[Parameter], dtype: Dtype) -> Self {
        let ty = |p: &Parameter| TensorType::new(p.dtype(dtype), &p.shape[..]);
        let argument = |p: &Parameter| (p.role, builder.argument(p.name(), ty(p)));
        Self::new(table.iter().map(argument))
    }

    /// Values with their roles.
    pub fn new(values: impl IntoIterator<Item = (Role, Value)>) -> Self {
        Self { values: values.into_iter().collect(), transposed: false }
    }

    /// Those of a layer, of which these are the stacks.
    pub(super) fn of_layer(&self, values: impl IntoIterator<Item = (Role, Value)>) -> Self {
        Self { transposed: self.transposed, ..Self::new(values) }
    }

    /// The same parameters with the matrices of the model that products take as `[in, out]`. A tied head is one of its own then.
    pub(crate) fn transposed(&self) -> Self {
        let mut values = self.values.clone();
        values.insert(Role::LmHead, self.head().clone());
        for (_, value) in values.iter_mut().filter(|(role, _)| Matrix::of(**role).is_some()) {
            let mut dimensions: Vec<usize> = (0..value.shape().len()).collect();
            let first = dimensions.len() - 2;
            dimensions.swap(first, first + 1);
            *value = value.transpose(&dimensions);
        }
        Self { values, transposed: true }
    }

    /// The dimension of the matrix of this role that products sum over.
    pub(super) fn summed(&self, role: Role) -> usize {
        if self.transposed && Matrix::of(role).is_some() { 0 } else { 1 }
    }

    /// The parameter of this role, where the model has it.
    pub fn get(&self, role: Role) -> Option<&Value> {
        self.values.get(&role)
    }

    /// The role of the LM head: that of a tied model is the embedding.
    pub(super) fn head_role(&self) -> Role {
        if self.values.contains_key(&Role::LmHead) { Role::LmHead } else { Role::EmbedTokens }
    }

    /// The LM head `[V, H]`: that of a tied model is the embedding.
    pub fn head(&self) -> &Value {
        &self[self.head_role()]
    }

    /// All of them, in the order of their roles.
    pub fn iter(&self) -> impl Iterator<Item = (Role, &Value)> {
        self.values.iter().map(|(role, value)| (*role, value))
    }
}

impl std::ops::Index<Role> for ParameterValues {
    type Output = Value;

    /// # Panics
    /// When the model has no such parameter; [`ParameterValues::get`] does not.
    fn index(&self, role: Role) -> &Value {
        self.values.get(&role).unwrap_or_else(|| panic!("{role:?} is a parameter of every model"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_of_all_kinds_of_models_are_the_tensors_of_hugging_face() {
        let base = ModelConfig::default();
        for config in [
            base.clone(),
            ModelConfig { tie_word_embeddings: true, attention_bias: false, ..base.clone() },
            ModelConfig { qk_norm: true, attention_bias: false, head_dim: Some(24), ..base },
        ] {
            let mut found: Vec<(String, Vec<usize>)> = parameters(&config)
                .iter()
                .flat_map(|p| p.hugging_face().into_iter().map(|name| (name, p.tensor_shape().to_vec())))
                .collect();
            let mut expected: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
            found.sort();
            expected.sort();
            assert_eq!(found, expected);
            assert!(parameters(&config).iter().all(|p| p.axes.len() == p.shape.len()));
        }
    }
}
