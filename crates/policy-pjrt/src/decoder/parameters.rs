//! The table of a decoder's parameters: shapes, logical axes, and names of their Hugging Face tensors.
//!
//! Legend: L layers, E experts, V vocabulary, H hidden size, I intermediate size of the MLP, A query heads, K key/value heads, D head dimension;
//! of a Gated DeltaNet: Hv value heads, Dv their width, C channels of the convolution.

use super::Matrix;
use models::{LayerSpec, Mixer, ModelConfig, Quantization};
use stablehlo::{Dtype, TensorType, Value};
use std::collections::BTreeMap;

/// The role of a parameter in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in Hugging Face's folders; `Parameter::tensors` has the names
pub enum Role {
    EmbedTokens,
    InputLayernorm,
    QProj,
    QBias,
    KProj,
    KBias,
    VProj,
    VBias,
    /// Queries, keys and values in one matrix.
    QkvProj,
    OProj,
    OBias,
    /// Logits of the sinks of query heads.
    Sinks,
    /// The factor of a layer's output, which is never trained.
    LayerScalar,
    QNorm,
    KNorm,
    /// Queries, keys and values of a Gated DeltaNet, before its convolution.
    InProjQkv,
    /// Output gates of a Gated DeltaNet.
    InProjZ,
    InProjB,
    InProjA,
    Conv1d,
    ALog,
    DtBias,
    /// The norm of the outputs of a Gated DeltaNet.
    LinearNorm,
    OutProj,
    PostAttentionLayernorm,
    PreFeedforwardLayernorm,
    GateProj,
    UpProj,
    /// Gate and up in one matrix.
    GateUpProj,
    DownProj,
    /// The router of a mixture of experts.
    Router,
    RouterBias,
    /// Gate projections of all experts.
    ExpertGateProj,
    ExpertUpProj,
    /// Gate and up of all experts in one matrix, in gpt-oss.
    ExpertGateUpProj,
    ExpertGateUpBias,
    ExpertDownProj,
    ExpertDownBias,
    PostFeedforwardLayernorm,
    Norm,
    LmHead,
    /// A of the adapter of a matrix.
    LoraA(Matrix),
    /// B of the adapter of a matrix.
    LoraB(Matrix),
    /// The scales of a quantised matrix.
    Scales(Matrix),
    ValueHead,
    ValueHeadBias,
}

impl Role {
    /// The norms of a layer's inputs and outputs, by the names of their modules.
    const NORMS: [(Self, &'static str); 4] = [
        (Self::InputLayernorm, "input_layernorm"),
        (Self::PostAttentionLayernorm, "post_attention_layernorm"),
        (Self::PreFeedforwardLayernorm, "pre_feedforward_layernorm"),
        (Self::PostFeedforwardLayernorm, "post_feedforward_layernorm"),
    ];

    /// Returns the norm of a layer with this module name.
    pub(super) fn of_norm(module: &str) -> Option<Self> {
        Self::NORMS.into_iter().find(|(_, name)| *name == module).map(|(role, _)| role)
    }

    /// Returns the mixer of the layers that have such a parameter; `None` if it does not depend on the mixer.
    pub(crate) fn mixer(self) -> Option<Mixer> {
        use Matrix::{InProjA, InProjB, InProjQkv, InProjZ, KProj, OProj, OutProj, QProj, QkvProj, VProj};
        match self {
            Self::QProj | Self::QBias | Self::KProj | Self::KBias | Self::VProj | Self::VBias => Some(Mixer::Attention),
            Self::QkvProj | Self::OProj | Self::OBias | Self::Sinks => Some(Mixer::Attention),
            Self::QNorm | Self::KNorm => Some(Mixer::Attention),
            Self::InProjQkv | Self::InProjZ | Self::InProjB | Self::InProjA => Some(Mixer::GatedDeltaNet),
            Self::Conv1d | Self::ALog | Self::DtBias => Some(Mixer::GatedDeltaNet),
            Self::LinearNorm | Self::OutProj => Some(Mixer::GatedDeltaNet),
            Self::LoraA(matrix) | Self::LoraB(matrix) | Self::Scales(matrix) => match matrix {
                QProj | KProj | VProj | QkvProj | OProj => Some(Mixer::Attention),
                InProjQkv | InProjZ | InProjB | InProjA | OutProj => Some(Mixer::GatedDeltaNet),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns `true` if layers have such a parameter.
    pub fn is_of_layers(self) -> bool {
        let head = Matrix::LmHead;
        !matches!(self, Self::EmbedTokens | Self::Norm | Self::LmHead)
            && self != Self::LoraA(head)
            && self != Self::LoraB(head)
            && !self.is_of_value_head()
    }

    /// Returns `true` for parameters of the base model, `false` for adapters and the value head.
    pub fn is_of_model(self) -> bool {
        !matches!(self, Self::LoraA(_) | Self::LoraB(_)) && !self.is_of_value_head()
    }

    /// Returns `true` for matrices, biases and adapters of experts.
    pub fn is_of_experts(self) -> bool {
        match self {
            Self::ExpertGateProj | Self::ExpertUpProj | Self::ExpertGateUpProj | Self::ExpertDownProj => true,
            Self::ExpertGateUpBias | Self::ExpertDownBias => true,
            Self::LoraA(matrix) | Self::LoraB(matrix) => matrix.is_of_experts(),
            _ => false,
        }
    }

    /// Returns `true` for parameters of the value head.
    pub fn is_of_value_head(self) -> bool {
        matches!(self, Self::ValueHead | Self::ValueHeadBias)
    }
}

/// The logical axis of a dimension of a parameter or an activation. [`AxisRules`](super::AxisRules) maps logical axes to axes of a device
/// mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Layers, L; never sharded.
    Layer,
    /// The hidden dimension, H.
    Embed,
    /// Query heads and their columns, A D.
    Heads,
    /// Key/value heads and their columns, K D.
    Kv,
    /// The bias of queries: sharded like [`Axis::Heads`], and over the mesh axes of [`Axis::Embed`] if they divide its `columns`.
    HeadsBias {
        /// The number of columns of the queries.
        columns: usize,
    },
    /// The bias of keys or of values: sharded like [`Axis::Kv`], and over the mesh axes of [`Axis::Embed`] if they divide its `columns`.
    KvBias {
        /// The number of columns of the keys or the values.
        columns: usize,
    },
    /// The dimension of one head, D.
    HeadDim,
    /// One value; not sharded.
    One,
    /// Query heads, A, with one value each; not sharded.
    QueryHead,
    /// The value heads of a Gated DeltaNet and their columns, Hv Dv; its key heads in activations. A value head is on the device of its key
    /// head.
    LinearHeads,
    /// The channels of the convolution of a Gated DeltaNet, C; usually not sharded, because the channels of a head are in three places.
    Channels,
    /// The single input of a channel of a convolution; not sharded.
    ChannelInput,
    /// The tokens that a convolution reads; not sharded.
    Taps,
    /// The columns of a value head of a Gated DeltaNet, Dv; not sharded.
    ValueDim,
    /// The columns of all queries, keys and values of a fused matrix, (A + 2K) D; usually not sharded, because heads of one kind belong
    /// together.
    FusedHeads,
    /// The intermediate dimension of the MLP, I.
    Mlp,
    /// The columns of gate and up of a fused matrix, 2I; usually not sharded.
    FusedMlp,
    /// The experts of their matrices, biases and adapters, E.
    Experts,
    /// The rows of B of experts, which are sharded along [`Axis::Experts`] instead.
    ExpertRows,
    /// The experts of a router, E; not sharded, because a router compares all of them.
    RouterExperts,
    /// The vocabulary, V.
    Vocab,
    /// The rank of an adapter.
    Rank,
    /// The single output of the value head.
    Value,
    /// The blocks of a row of 8-bit moments, where shards of the row do not have whole blocks; not sharded.
    Blocks,
    /// The rows of activations, B, or their tokens, N; not an axis of parameters.
    Batch,
    /// The tokens of a row in the residual stream, T; not an axis of parameters. Attention and MLP see all tokens of a row.
    Length,
}

/// The role of a parameter and the index of its stack: 0 unless layers have different shapes for the role.
pub type ParameterId = (Role, usize);

/// The contents of the tensors of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Floating-point values.
    Values,
    /// Codes of quantised values, in words of 32 bits.
    Codes(Quantization),
    /// Scales of quantised values, f32.
    Scales(Quantization),
}

/// A parameter on a device: one Hugging Face tensor, or a stack of the tensors of all layers in which they have this shape; if each expert
/// has a tensor, those of all experts of these layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its role in the decoder.
    pub role: Role,
    /// Its number among the stacks of this role.
    pub number: usize,
    /// The layers of the stack, in ascending order; empty for a parameter that is not of layers.
    pub layers: Vec<usize>,
    /// The shape; `[L, ...]` for a parameter of L layers, `[L, E, ...]` if each of E experts has a tensor. Matrices are `[out, in]`, as in Hugging Face files.
    pub shape: Vec<usize>,
    /// The logical axis of each dimension.
    pub axes: Vec<Axis>,
    /// The contents of its tensors.
    pub format: Format,
    /// The short name.
    pub(super) path: String,
    /// The names of its tensors.
    pub(super) names: Names,
    /// The number of leading dimensions that stack tensors: layers and, if each expert has a tensor, experts.
    pub(super) stacked: usize,
}

/// The names of the tensors of a parameter. A model of experts has tens of thousands, which are built when they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// A tensor of every layer of the stack, with this path in the layer; if each of a number of experts has a tensor, its number follows
    /// `experts.` in the path.
    OfLayers { path: &'static str, experts: Option<usize> },
    /// Tensors, each with its index in the stack.
    Listed(Vec<(usize, String)>),
}

impl Parameter {
    /// Returns the parameter's key in [`ParameterValues`].
    pub fn id(&self) -> ParameterId {
        (self.role, self.number)
    }

    /// Returns `true` if it stacks the tensors of layers.
    pub fn is_stacked(&self) -> bool {
        self.stacked > 0
    }

    /// Returns the number of leading dimensions that stack tensors.
    pub(crate) fn stacked(&self) -> usize {
        self.stacked
    }

    /// Returns the names of its tensors in `transformers`, each with its index in the stack, in row-major order. Tensors of adapters have PEFT's names; layers without an
    /// adapter have no name, and zeros in the stack.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, String)> {
        (0..self.tensor_count()).map(|at| match &self.names {
            Names::Listed(names) => names[at].clone(),
            Names::OfLayers { path, experts: None } => (at, format!("model.layers.{}.{path}", self.layers[at])),
            Names::OfLayers { path, experts: Some(count) } => {
                let path = path.replace("experts.", &format!("experts.{}.", at % count));
                (at, format!("model.layers.{}.{path}", self.layers[at / count]))
            }
        })
    }

    /// Returns `true` if the stack has a tensor at this index; layers without an adapter have none.
    pub(crate) fn has_tensor(&self, index: usize) -> bool {
        match &self.names {
            Names::OfLayers { .. } => index < self.tensor_count(),
            Names::Listed(names) => names.iter().any(|(at, _)| *at == index),
        }
    }

    /// Returns the number of its tensors.
    fn tensor_count(&self) -> usize {
        match &self.names {
            Names::OfLayers { experts, .. } => self.layers.len() * experts.unwrap_or(1),
            Names::Listed(names) => names.len(),
        }
    }

    /// Returns the number of weights.
    pub fn count(&self) -> usize {
        self.tensor_count() * self.tensor_shape().iter().product::<usize>()
    }

    /// Returns `true` if its tensors are matrices; norms and biases are vectors.
    pub fn has_matrices(&self) -> bool {
        self.tensor_shape().len() > 1
    }

    /// Returns the dtype in programs for a model whose matrices have dtype `model`, f32 or bf16. Norms, biases, adapters and value heads
    /// are always f32; words of codes are u32, and their scales f32.
    pub fn dtype(&self, model: Dtype) -> Dtype {
        match self.format {
            Format::Values => {}
            Format::Codes(_) => return Dtype::U32,
            Format::Scales(_) => return Dtype::F32,
        }
        if self.role.is_of_model() && self.has_matrices() { model } else { Dtype::F32 }
    }

    /// Returns the shape of one of its tensors.
    pub fn tensor_shape(&self) -> &[usize] {
        &self.shape[self.stacked..]
    }

    /// Returns the shape of one of its tensors in files. It differs for adapters of experts: PEFT's A `[E r, I]` and B `[O, r E]` have the ranks
    /// of all experts in one dimension, in the same order of values.
    pub fn file_shape(&self) -> Vec<usize> {
        let shape = self.tensor_shape();
        let (before, rest) = shape.split_at(self.joined().unwrap_or(shape.len()).min(shape.len()));
        match rest {
            [rank, experts, rest @ ..] => [before, &[rank * experts], rest].concat(),
            _ => shape.to_vec(),
        }
    }

    /// Returns the number of dimensions of one of its tensors that are its first `count` dimensions in files.
    pub(crate) fn dimensions_of(&self, count: usize) -> usize {
        count + usize::from(self.joined().is_some_and(|joined| count > joined))
    }

    /// Returns the dimension of its tensors that is joined with the next one in files.
    fn joined(&self) -> Option<usize> {
        match self.role {
            Role::LoraA(matrix) if matrix.is_of_experts() => Some(0),
            Role::LoraB(matrix) if matrix.is_of_experts() => Some(1),
            _ => None,
        }
    }

    /// Returns the logical axes of one of its tensors.
    pub fn tensor_axes(&self) -> &[Axis] {
        &self.axes[self.stacked..]
    }

    /// Returns the parameter with other sizes.
    pub(crate) fn with_shape(&self, shape: Vec<usize>, axes: Vec<Axis>) -> Self {
        Self { shape, axes, ..self.clone() }
    }

    /// Returns the short name, which programs use.
    pub fn name(&self) -> &str {
        &self.path
    }
}

/// Returns the parameters of a decoder, in the argument order of programs.
pub fn parameters(config: &ModelConfig) -> Vec<Parameter> {
    use Axis::{ChannelInput, One, QueryHead, RouterExperts, Taps, ValueDim, Vocab};
    use Axis::{Channels, Embed, Experts, FusedHeads, FusedMlp, HeadDim, Heads, Kv, Layer, LinearHeads, Mlp};
    let linear = config.linear_attention.unwrap_or_default();
    let experts = config.experts.as_ref();
    let (wide, count) =
        experts.map_or((config.intermediate_size, 1), |experts| (experts.moe_intermediate_size, experts.num_experts));
    let is_clamped = experts.is_some_and(|experts| experts.clamped.is_some());
    let size = |role: Role, axis: &Axis, spec: LayerSpec| match axis {
        // The gate of a head follows its query.
        Heads if matches!(role, Role::QProj | Role::QBias) && config.attention_output_gate => {
            2 * config.heads(spec).query_columns()
        }
        LinearHeads if matches!(role, Role::InProjZ | Role::OutProj) => linear.values(),
        LinearHeads => linear.linear_num_value_heads,
        Channels => linear.conv_channels(),
        ChannelInput => 1,
        Taps => linear.linear_conv_kernel_dim,
        ValueDim => linear.linear_value_head_dim,
        Embed => config.hidden_size,
        Heads => config.heads(spec).query_columns(),
        Kv => config.heads(spec).key_columns(),
        FusedHeads => config.heads(spec).query_columns() + 2 * config.heads(spec).key_columns(),
        HeadDim => config.heads(spec).width,
        One => 1,
        QueryHead => config.num_attention_heads,
        Mlp => wide,
        FusedMlp => 2 * wide,
        Experts | RouterExperts => count,
        Vocab => config.vocab_size,
        Layer
        | Axis::HeadsBias { .. }
        | Axis::KvBias { .. }
        | Axis::ExpertRows
        | Axis::Rank
        | Axis::Value
        | Axis::Blocks
        | Axis::Batch
        | Axis::Length => {
            unreachable!("no parameter of the model has it")
        }
    };
    let norms = config.norm_placement.names();
    let is_there = |role: Role, path: &str, spec: LayerSpec| match role {
        _ if role.mixer().is_some_and(|mixer| mixer != spec.mixer) => false,
        Role::QBias | Role::KBias | Role::VBias => config.attention_bias,
        Role::OBias => config.attention_output_bias,
        Role::Sinks => config.attention_sinks,
        Role::LayerScalar => config.layer_scalars,
        Role::VProj if spec.keys_are_values => false,
        Role::QProj | Role::KProj | Role::VProj => !config.fused_projections,
        Role::QkvProj => config.fused_projections,
        Role::GateProj | Role::UpProj => experts.is_none() && !config.fused_projections,
        Role::GateUpProj => experts.is_none() && config.fused_projections,
        Role::DownProj => experts.is_none(),
        Role::Router => experts.is_some_and(|experts| path.strip_suffix(".weight") == Some(experts.router())),
        Role::ExpertGateProj | Role::ExpertUpProj => experts.is_some() && !is_clamped,
        Role::ExpertDownProj => experts.is_some() && path.ends_with(".weight") != is_clamped,
        Role::RouterBias | Role::ExpertGateUpProj | Role::ExpertGateUpBias | Role::ExpertDownBias => is_clamped,
        Role::QNorm | Role::KNorm => config.qk_norm,
        norm if Role::NORMS.iter().any(|(role, _)| *role == norm) => norms.contains(&path.strip_suffix(".weight")),
        Role::LmHead => !config.tie_word_embeddings,
        _ => true,
    };
    let [of_queries, of_keys] = if config.qk_norm_over_heads { [Heads, Kv] } else { [HeadDim, HeadDim] };
    let all: [(Role, &'static str, &[Axis]); 43] = [
        // Factors of layers and routers come first, because trained parameters come last, and routers may be frozen.
        (Role::LayerScalar, "layer_scalar", &[Layer, One]),
        (Role::Router, "mlp.gate.weight", &[Layer, RouterExperts, Embed]),
        (Role::Router, "mlp.router.weight", &[Layer, RouterExperts, Embed]),
        (Role::RouterBias, "mlp.router.bias", &[Layer, RouterExperts]),
        (Role::EmbedTokens, "model.embed_tokens.weight", &[Vocab, Embed]),
        (Role::InputLayernorm, "input_layernorm.weight", &[Layer, Embed]),
        (Role::QProj, "self_attn.q_proj.weight", &[Layer, Heads, Embed]),
        (Role::QBias, "self_attn.q_proj.bias", &[Layer, Heads]),
        (Role::KProj, "self_attn.k_proj.weight", &[Layer, Kv, Embed]),
        (Role::KBias, "self_attn.k_proj.bias", &[Layer, Kv]),
        (Role::VProj, "self_attn.v_proj.weight", &[Layer, Kv, Embed]),
        (Role::VBias, "self_attn.v_proj.bias", &[Layer, Kv]),
        (Role::QkvProj, "self_attn.qkv_proj.weight", &[Layer, FusedHeads, Embed]),
        (Role::OProj, "self_attn.o_proj.weight", &[Layer, Embed, Heads]),
        (Role::OBias, "self_attn.o_proj.bias", &[Layer, Embed]),
        (Role::Sinks, "self_attn.sinks", &[Layer, QueryHead]),
        (Role::QNorm, "self_attn.q_norm.weight", &[Layer, of_queries]),
        (Role::KNorm, "self_attn.k_norm.weight", &[Layer, of_keys]),
        (Role::InProjQkv, "linear_attn.in_proj_qkv.weight", &[Layer, Channels, Embed]),
        (Role::InProjZ, "linear_attn.in_proj_z.weight", &[Layer, LinearHeads, Embed]),
        (Role::InProjB, "linear_attn.in_proj_b.weight", &[Layer, LinearHeads, Embed]),
        (Role::InProjA, "linear_attn.in_proj_a.weight", &[Layer, LinearHeads, Embed]),
        (Role::Conv1d, "linear_attn.conv1d.weight", &[Layer, Channels, ChannelInput, Taps]),
        (Role::ALog, "linear_attn.A_log", &[Layer, LinearHeads]),
        (Role::DtBias, "linear_attn.dt_bias", &[Layer, LinearHeads]),
        (Role::LinearNorm, "linear_attn.norm.weight", &[Layer, ValueDim]),
        (Role::OutProj, "linear_attn.out_proj.weight", &[Layer, Embed, LinearHeads]),
        (Role::PostAttentionLayernorm, "post_attention_layernorm.weight", &[Layer, Embed]),
        (Role::PreFeedforwardLayernorm, "pre_feedforward_layernorm.weight", &[Layer, Embed]),
        (Role::GateProj, "mlp.gate_proj.weight", &[Layer, Mlp, Embed]),
        (Role::UpProj, "mlp.up_proj.weight", &[Layer, Mlp, Embed]),
        (Role::GateUpProj, "mlp.gate_up_proj.weight", &[Layer, FusedMlp, Embed]),
        (Role::DownProj, "mlp.down_proj.weight", &[Layer, Embed, Mlp]),
        (Role::ExpertGateProj, "mlp.experts.gate_proj.weight", &[Layer, Experts, Mlp, Embed]),
        (Role::ExpertUpProj, "mlp.experts.up_proj.weight", &[Layer, Experts, Mlp, Embed]),
        (Role::ExpertDownProj, "mlp.experts.down_proj.weight", &[Layer, Experts, Embed, Mlp]),
        (Role::ExpertGateUpProj, "mlp.experts.gate_up_proj", &[Layer, Experts, Embed, FusedMlp]),
        (Role::ExpertGateUpBias, "mlp.experts.gate_up_proj_bias", &[Layer, Experts, FusedMlp]),
        (Role::ExpertDownProj, "mlp.experts.down_proj", &[Layer, Experts, Mlp, Embed]),
        (Role::ExpertDownBias, "mlp.experts.down_proj_bias", &[Layer, Experts, Embed]),
        (Role::PostFeedforwardLayernorm, "post_feedforward_layernorm.weight", &[Layer, Embed]),
        (Role::Norm, "model.norm.weight", &[Embed]),
        (Role::LmHead, "lm_head.weight", &[Vocab, Embed]),
    ];
    let of_layers = |role: Role, path: &'static str, axes: &[Axis]| {
        // In gpt-oss, one tensor has all experts of a layer.
        let is_apart = role.is_of_experts() && !is_clamped;
        // The shapes in the order of the first layer that has them.
        let mut stacks: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for layer in (0..config.num_hidden_layers).filter(|layer| is_there(role, path, config.layer(*layer))) {
            let shape: Vec<usize> = axes[1..].iter().map(|axis| size(role, axis, config.layer(layer))).collect();
            match stacks.iter_mut().find(|(of, _)| *of == shape) {
                Some((_, layers)) => layers.push(layer),
                None => stacks.push((shape, vec![layer])),
            }
        }
        let parameter = |(number, (mut shape, layers)): (usize, (Vec<usize>, Vec<usize>))| {
            let names = Names::OfLayers { path, experts: is_apart.then_some(count) };
            shape.insert(0, layers.len());
            let path = if number == 0 { path.to_owned() } else { format!("{path}.{number}") };
            let stacked = if is_apart { 2 } else { 1 };
            let axes = axes.iter().zip(&shape).map(|(axis, size)| match (role, axis) {
                (Role::QBias, Heads) => Axis::HeadsBias { columns: *size },
                (Role::KBias | Role::VBias, Kv) => Axis::KvBias { columns: *size },
                (_, axis) => *axis,
            });
            let (axes, format) = (axes.collect(), Format::Values);
            Parameter { role, number, layers, shape, axes, format, path, names, stacked }
        };
        stacks.into_iter().enumerate().map(parameter).collect::<Vec<_>>()
    };
    let plain = LayerSpec::default();
    all.into_iter()
        .flat_map(|(role, path, axes)| match role.is_of_layers() {
            true => of_layers(role, path, axes),
            false if !is_there(role, path, plain) => Vec::new(),
            false => {
                let shape = axes.iter().map(|axis| size(role, axis, plain)).collect();
                let (path, names) = (path.to_owned(), Names::Listed(vec![(0, path.to_owned())]));
                let (axes, layers, format) = (axes.to_vec(), Vec::new(), Format::Values);
                vec![Parameter { role, number: 0, layers, shape, axes, format, path, names, stacked: 0 }]
            }
        })
        .collect()
}

/// The parameters of a decoder or of one of its layers, as values of a program.
#[derive(Clone, Debug)]
pub struct ParameterValues {
    values: BTreeMap<ParameterId, Value>,
    /// `true` if the model's matrices are `[in, out]`.
    transposed: bool,
}

impl ParameterValues {
    /// Declares the parameters of `table` as the next arguments of a program. `dtype` is the dtype of the model's matrices
    /// ([`Parameter::dtype`]).
    pub fn arguments(builder: &stablehlo::Builder, table: &[Parameter], dtype: Dtype) -> Self {
        let ty = |p: &Parameter| TensorType::new(p.dtype(dtype), &p.shape[..]);
        let argument = |p: &Parameter| (p.id(), builder.argument(p.name(), ty(p)));
        Self::new(table.iter().map(argument))
    }

    /// Creates the map from parameters to values.
    pub fn new(values: impl IntoIterator<Item = (ParameterId, Value)>) -> Self {
        Self { values: values.into_iter().collect(), transposed: false }
    }

    /// Returns the parameters of one layer, given its slices of these stacks.
    pub(super) fn of_layer(&self, values: impl IntoIterator<Item = (Role, Value)>) -> Self {
        Self { transposed: self.transposed, ..Self::new(values.into_iter().map(|(role, value)| ((role, 0), value))) }
    }

    /// Returns the same parameters with the model's matrices transposed to `[in, out]`. A tied head becomes a separate value.
    pub(crate) fn transposed(&self) -> Self {
        let mut values = self.values.clone();
        values.insert((Role::LmHead, 0), self.head().clone());
        for (_, value) in values.iter_mut().filter(|((role, _), _)| Matrix::of(*role).is_some()) {
            let mut dimensions: Vec<usize> = (0..value.shape().len()).collect();
            let first = dimensions.len() - 2;
            dimensions.swap(first, first + 1);
            *value = value.transpose(&dimensions);
        }
        Self { values, transposed: true }
    }

    /// Returns the contracted dimension of the matrix of this role.
    pub(super) fn summed(&self, role: Role) -> usize {
        if self.transposed && Matrix::of(role).is_some() { 0 } else { 1 }
    }

    /// Returns the parameter of this role, if the model has it.
    pub fn get(&self, role: Role) -> Option<&Value> {
        self.values.get(&(role, 0))
    }

    /// Returns the role of the LM head; if it is tied, the role of the embedding.
    pub(super) fn head_role(&self) -> Role {
        if self.values.contains_key(&(Role::LmHead, 0)) { Role::LmHead } else { Role::EmbedTokens }
    }

    /// Returns the LM head `[V, H]`; if it is tied, the embedding.
    pub fn head(&self) -> &Value {
        &self[self.head_role()]
    }

    /// Returns the value of a parameter.
    ///
    /// # Panics
    /// Panics if the model has no such parameter.
    #[track_caller]
    pub fn of(&self, id: ParameterId) -> &Value {
        self.values.get(&id).unwrap_or_else(|| panic!("{id:?} is a parameter of the model"))
    }

    /// Iterates over all parameters, in the order of their roles.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Value)> {
        self.values.iter().map(|(id, value)| (*id, value))
    }
}

impl std::ops::Index<Role> for ParameterValues {
    type Output = Value;

    /// # Panics
    /// Panics if the model has no such parameter; [`ParameterValues::get`] returns `None` instead.
    fn index(&self, role: Role) -> &Value {
        self.get(role).unwrap_or_else(|| panic!("{role:?} is a parameter of every model"))
    }
}
