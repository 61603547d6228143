//! The table of the tensors of decoders. Layouts of policies, initial values, adapters and checkpoints derive from it.

use super::{Axis, Matrix, Role};
use crate::config::ModelConfig;
use crate::layer::{LayerSpec, Mixer};
use Axis::{
    ChannelInput, Channels, Embed, Experts, FusedHeads, FusedMlp, HeadDim, Heads, Kv, LinearHeads, Mlp, One, QueryHead,
    RouterExperts, Taps, ValueDim, Vocab,
};
use Initial::{Linear, LogOfUniform, Normal, Ones, Scale, Zeros};

/// A tensor of a decoder, or a tensor of each of its layers or experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParameterSpec {
    /// The role in the decoder, which also decides whether it is trained, adapted and quantised ([`Role::is_constant`], [`Matrix::of`]).
    pub role: Role,
    /// The initial values.
    pub initial: Initial,
    /// The name in `transformers`, within a layer for tensors of layers.
    pub path: &'static str,
    /// The name of the fused parameter that contains it. Matrices with the same input are columns of one fused matrix `[in, out]`, in the order of
    /// the table.
    pub fused: &'static str,
    /// The logical axis of each dimension; the first one is [`Axis::Experts`] if each expert has a tensor.
    pub axes: &'static [Axis],
}

/// The initial values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// A part of a fused random matrix: normal values. Such tensors are the projections of layers, which can be quantised.
    Linear,
    /// Normal values.
    Normal,
    /// The weight of a norm that multiplies by 1: zeros if weights are centred at 0, otherwise ones.
    Scale,
    /// Ones.
    Ones,
    /// Zeros.
    Zeros,
    /// ln(x) with x uniform between 0.01 and 16.
    LogOfUniform,
}

const fn row(
    role: Role,
    initial: Initial,
    path: &'static str,
    fused: &'static str,
    axes: &'static [Axis],
) -> ParameterSpec {
    ParameterSpec { role, initial, path, fused, axes }
}

/// All tensors of all decoders, in the argument order of programs.
pub static PARAMETERS: &[ParameterSpec] = &[
    // Factors of layers and routers come first, because trained parameters come last, and routers may be frozen.
    row(Role::LayerScalar, Ones, "layer_scalar", "layer_scalar", &[One]),
    row(Role::CorrectionBias, Zeros, "mlp.gate.e_score_correction_bias", "mlp.correction_bias", &[RouterExperts]),
    row(Role::Router, Normal, "mlp.gate.weight", "mlp.router.weight", &[RouterExperts, Embed]),
    row(Role::Router, Normal, "mlp.router.weight", "mlp.router.weight", &[RouterExperts, Embed]),
    row(Role::RouterBias, Zeros, "mlp.router.bias", "mlp.router.bias", &[RouterExperts]),
    row(Role::EmbedTokens, Normal, "model.embed_tokens.weight", "embed_tokens", &[Vocab, Embed]),
    row(Role::InputLayernorm, Scale, "input_layernorm.weight", "input_norm.weight", &[Embed]),
    row(Role::QProj, Linear, "self_attn.q_proj.weight", "attn.qkv_proj.weight", &[Heads, Embed]),
    row(Role::QBias, Zeros, "self_attn.q_proj.bias", "attn.qkv_proj.bias", &[Heads]),
    row(Role::KProj, Linear, "self_attn.k_proj.weight", "attn.qkv_proj.weight", &[Kv, Embed]),
    row(Role::KBias, Zeros, "self_attn.k_proj.bias", "attn.qkv_proj.bias", &[Kv]),
    row(Role::VProj, Linear, "self_attn.v_proj.weight", "attn.qkv_proj.weight", &[Kv, Embed]),
    row(Role::VBias, Zeros, "self_attn.v_proj.bias", "attn.qkv_proj.bias", &[Kv]),
    row(Role::QkvProj, Linear, "self_attn.qkv_proj.weight", "attn.qkv_proj.weight", &[FusedHeads, Embed]),
    row(Role::OProj, Linear, "self_attn.o_proj.weight", "attn.o_proj.weight", &[Embed, Heads]),
    row(Role::OBias, Zeros, "self_attn.o_proj.bias", "attn.o_proj.bias", &[Embed]),
    row(Role::Sinks, Zeros, "self_attn.sinks", "attn.sinks", &[QueryHead]),
    row(Role::QNorm, Scale, "self_attn.q_norm.weight", "attn.q_norm.weight", &[HeadDim]),
    row(Role::QNorm, Scale, "self_attn.q_norm.weight", "attn.q_norm.weight", &[Heads]),
    row(Role::KNorm, Scale, "self_attn.k_norm.weight", "attn.k_norm.weight", &[HeadDim]),
    row(Role::KNorm, Scale, "self_attn.k_norm.weight", "attn.k_norm.weight", &[Kv]),
    row(Role::InProjQkv, Linear, "linear_attn.in_proj_qkv.weight", "attn.in_proj.weight", &[Channels, Embed]),
    row(Role::InProjZ, Linear, "linear_attn.in_proj_z.weight", "attn.in_proj.weight", &[LinearHeads, Embed]),
    row(Role::InProjB, Linear, "linear_attn.in_proj_b.weight", "attn.in_proj.weight", &[LinearHeads, Embed]),
    row(Role::InProjA, Linear, "linear_attn.in_proj_a.weight", "attn.in_proj.weight", &[LinearHeads, Embed]),
    row(Role::Conv1d, Normal, "linear_attn.conv1d.weight", "attn.conv", &[Channels, ChannelInput, Taps]),
    row(Role::ALog, LogOfUniform, "linear_attn.A_log", "attn.a_log", &[LinearHeads]),
    row(Role::DtBias, Ones, "linear_attn.dt_bias", "attn.dt_bias", &[LinearHeads]),
    row(Role::LinearNorm, Ones, "linear_attn.norm.weight", "attn.norm", &[ValueDim]),
    row(Role::OutProj, Linear, "linear_attn.out_proj.weight", "attn.out_proj.weight", &[Embed, LinearHeads]),
    row(Role::PostAttentionLayernorm, Scale, "post_attention_layernorm.weight", "attn_output_norm.weight", &[Embed]),
    row(Role::PostAttentionLayernorm, Scale, "post_attention_layernorm.weight", "post_norm.weight", &[Embed]),
    row(Role::PreFeedforwardLayernorm, Scale, "pre_feedforward_layernorm.weight", "post_norm.weight", &[Embed]),
    row(Role::GateProj, Linear, "mlp.gate_proj.weight", "mlp.gate_up_proj.weight", &[Mlp, Embed]),
    row(Role::UpProj, Linear, "mlp.up_proj.weight", "mlp.gate_up_proj.weight", &[Mlp, Embed]),
    row(Role::GateUpProj, Linear, "mlp.gate_up_proj.weight", "mlp.gate_up_proj.weight", &[FusedMlp, Embed]),
    row(Role::DownProj, Linear, "mlp.down_proj.weight", "mlp.down_proj.weight", &[Embed, Mlp]),
    shared(Role::SharedGateProj, "mlp.shared_expert.gate_proj.weight", "mlp.shared.gate_up_proj.weight", &[Mlp, Embed]),
    shared(
        Role::SharedGateProj,
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared.gate_up_proj.weight",
        &[Mlp, Embed],
    ),
    shared(Role::SharedUpProj, "mlp.shared_expert.up_proj.weight", "mlp.shared.gate_up_proj.weight", &[Mlp, Embed]),
    shared(Role::SharedUpProj, "mlp.shared_experts.up_proj.weight", "mlp.shared.gate_up_proj.weight", &[Mlp, Embed]),
    shared(Role::SharedDownProj, "mlp.shared_expert.down_proj.weight", "mlp.shared.down_proj.weight", &[Embed, Mlp]),
    shared(Role::SharedDownProj, "mlp.shared_experts.down_proj.weight", "mlp.shared.down_proj.weight", &[Embed, Mlp]),
    shared(Role::SharedGate, "mlp.shared_expert_gate.weight", "mlp.shared_gate.weight", &[One, Embed]),
    row(Role::ExpertGateProj, Normal, "mlp.experts.gate_proj.weight", "mlp.experts_gate_up", &[Experts, Mlp, Embed]),
    row(Role::ExpertUpProj, Normal, "mlp.experts.up_proj.weight", "mlp.experts_gate_up", &[Experts, Mlp, Embed]),
    row(Role::ExpertDownProj, Normal, "mlp.experts.down_proj.weight", "mlp.experts_down", &[Experts, Embed, Mlp]),
    // In gpt-oss, one tensor has all experts of a layer.
    row(Role::ExpertGateUpProj, Normal, "mlp.experts.gate_up_proj", "mlp.experts_gate_up", &[Experts, Embed, FusedMlp]),
    row(
        Role::ExpertGateUpBias,
        Zeros,
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts_gate_up_bias",
        &[Experts, FusedMlp],
    ),
    row(Role::ExpertDownProj, Normal, "mlp.experts.down_proj", "mlp.experts_down", &[Experts, Mlp, Embed]),
    row(Role::ExpertDownBias, Zeros, "mlp.experts.down_proj_bias", "mlp.experts_down_bias", &[Experts, Embed]),
    row(Role::PostFeedforwardLayernorm, Scale, "post_feedforward_layernorm.weight", "mlp_output_norm.weight", &[Embed]),
    row(Role::Norm, Scale, "model.norm.weight", "norm.weight", &[Embed]),
    row(Role::LmHead, Normal, "lm_head.weight", "lm_head", &[Vocab, Embed]),
];

/// A projection of the shared expert.
const fn shared(role: Role, path: &'static str, fused: &'static str, axes: &'static [Axis]) -> ParameterSpec {
    row(role, Linear, path, fused, axes)
}

impl ParameterSpec {
    /// Returns the rows of the table that a layer has, in the order of the table.
    pub fn of_layer(config: &ModelConfig, layer: LayerSpec) -> impl Iterator<Item = &'static Self> {
        PARAMETERS.iter().filter(move |row| row.role.is_of_layers() && row.is_in(config, layer))
    }

    /// Returns the rows of the table that a model has once, in the order of the table.
    pub fn of_model(config: &ModelConfig) -> impl Iterator<Item = &'static Self> {
        PARAMETERS.iter().filter(|row| !row.role.is_of_layers() && row.is_in(config, LayerSpec::default()))
    }

    /// Returns the module in `transformers`, such as `self_attn.q_proj`, or the name of a tensor that is not a module's weight or bias.
    pub fn module(&self) -> &'static str {
        self.path.strip_suffix(".weight").or_else(|| self.path.strip_suffix(".bias")).unwrap_or(self.path)
    }

    /// Returns the name in `transformers` of the tensor of a layer, and of an expert if each has one.
    ///
    /// ```
    /// let names = grpo_models::PARAMETERS.iter().map(|row| row.name(3, 7));
    /// assert!(names.into_iter().any(|name| name == "model.layers.3.mlp.experts.7.up_proj.weight"));
    /// ```
    pub fn name(&self, layer: usize, expert: usize) -> String {
        match self.path.strip_prefix("mlp.experts.") {
            _ if !self.role.is_of_layers() => self.path.to_owned(),
            Some(matrix) if self.is_per_expert() => format!("model.layers.{layer}.mlp.experts.{expert}.{matrix}"),
            _ => format!("model.layers.{layer}.{}", self.path),
        }
    }

    /// Returns `true` if each expert has such a tensor, so that the first axis is not a dimension of a tensor.
    pub fn is_per_expert(&self) -> bool {
        self.axes[0] == Experts && self.path.ends_with(".weight")
    }

    /// Returns `true` if the fused parameter has the transposed tensor as columns.
    pub fn is_transposed(&self) -> bool {
        self.role.is_of_layers() && self.path.ends_with(".weight") && self.tensor_axes().len() == 2
    }

    /// Returns `true` if the output of the matrix is added to the residual stream.
    pub fn adds_to_residual(&self) -> bool {
        ["o_proj", "out_proj", "down_proj"].iter().any(|end| self.module().rsplit('.').next() == Some(end))
    }

    /// Returns the sizes of all axes.
    pub fn shape(&self, config: &ModelConfig, layer: LayerSpec) -> Vec<usize> {
        self.axes.iter().map(|axis| size(*axis, self.role, config, layer)).collect()
    }

    /// Returns the shape of one tensor.
    pub fn tensor_shape(&self, config: &ModelConfig, layer: LayerSpec) -> Vec<usize> {
        self.shape(config, layer).split_off(usize::from(self.is_per_expert()))
    }

    fn mixer(&self) -> Option<Mixer> {
        match self.path.split_once('.')?.0 {
            "self_attn" => Some(Mixer::Attention),
            "linear_attn" => Some(Mixer::GatedDeltaNet),
            _ => None,
        }
    }

    fn tensor_axes(&self) -> &'static [Axis] {
        &self.axes[usize::from(self.is_per_expert())..]
    }

    /// Returns `true` if a model has such a tensor in a layer with this specification, or, for a tensor that is not of layers, at all.
    pub fn is_in(&self, config: &ModelConfig, layer: LayerSpec) -> bool {
        let experts = config.experts.as_ref().filter(|_| !layer.dense_mlp);
        let shared = experts.and_then(|experts| experts.shared_expert);
        let is_clamped = experts.is_some_and(|experts| experts.clamped.is_some());
        let is_norm = |place: usize| config.norm_placement.names()[place] == Some(self.module());
        match self.role {
            _ if self.mixer().is_some_and(|mixer| mixer != layer.mixer) => false,
            Role::InputLayernorm => is_norm(0),
            Role::PostAttentionLayernorm => is_norm(if self.fused == "post_norm.weight" { 2 } else { 1 }),
            Role::PreFeedforwardLayernorm => is_norm(2),
            Role::PostFeedforwardLayernorm => is_norm(3),
            Role::QBias | Role::KBias | Role::VBias => config.attention_bias,
            Role::OBias => config.attention_output_bias,
            Role::Sinks => config.attention_sinks,
            Role::LayerScalar => config.layer_scalars,
            Role::VProj if layer.keys_are_values => false,
            Role::QProj | Role::KProj | Role::VProj => !config.fused_projections,
            Role::QkvProj => config.fused_projections,
            Role::QNorm | Role::KNorm => config.qk_norm && config.qk_norm_over_heads == (self.axes[0] != HeadDim),
            Role::GateProj | Role::UpProj => experts.is_none() && !config.fused_projections,
            Role::GateUpProj => experts.is_none() && config.fused_projections,
            Role::DownProj => experts.is_none(),
            Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj => {
                shared.is_some_and(|shared| shared.is_gated == self.path.starts_with("mlp.shared_expert."))
            }
            Role::SharedGate => shared.is_some_and(|shared| shared.is_gated),
            Role::Router => experts.is_some() && is_clamped == (self.module() == "mlp.router"),
            Role::CorrectionBias => experts.is_some_and(|experts| experts.sigmoid.is_some()),
            Role::ExpertGateProj | Role::ExpertUpProj => experts.is_some() && !is_clamped,
            Role::ExpertDownProj => experts.is_some() && self.is_per_expert() != is_clamped,
            Role::RouterBias | Role::ExpertGateUpProj | Role::ExpertGateUpBias | Role::ExpertDownBias => is_clamped,
            Role::LmHead => !config.tie_word_embeddings,
            _ => true,
        }
    }
}

/// Returns the size of an axis of the parameter of this role.
fn size(axis: Axis, role: Role, config: &ModelConfig, layer: LayerSpec) -> usize {
    let heads = config.heads(layer);
    let linear = config.linear_attention.unwrap_or_default();
    let (wide, count) = config.experts.as_ref().map_or((0, 0), |of| (of.moe_intermediate_size, of.num_experts));
    let shared = config.experts.as_ref().and_then(|experts| experts.shared_expert);
    match axis {
        // The gate of a head follows its query.
        Heads if matches!(role, Role::QProj | Role::QBias) && config.attention_output_gate => 2 * heads.query_columns(),
        Heads => heads.query_columns(),
        Kv => heads.key_columns(),
        FusedHeads => heads.query_columns() + 2 * heads.key_columns(),
        HeadDim => heads.width,
        QueryHead => heads.query,
        LinearHeads if matches!(role, Role::InProjZ | Role::OutProj) => linear.values(),
        LinearHeads => linear.linear_num_value_heads,
        Channels => linear.conv_channels(),
        Taps => linear.linear_conv_kernel_dim,
        ValueDim => linear.linear_value_head_dim,
        Embed => config.hidden_size,
        Mlp if role.is_of_experts() => wide,
        FusedMlp if role.is_of_experts() => 2 * wide,
        Mlp if matches!(role, Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj) => {
            shared.map_or(0, |shared| shared.intermediate_size)
        }
        Mlp => config.intermediate_size,
        FusedMlp => 2 * config.intermediate_size,
        Experts | RouterExperts => count,
        Vocab => config.vocab_size,
        // The other axes are of adapters, of the value head, or not of parameters.
        _ => 1,
    }
}

impl Role {
    /// Returns the norm of a layer with this module name.
    pub fn of_norm(module: &str) -> Option<Self> {
        PARAMETERS.iter().find(|row| row.initial == Scale && row.module() == module).map(|row| row.role)
    }

    /// Returns the mixer of the layers that have such a parameter; `None` if it does not depend on the mixer.
    pub fn mixer(self) -> Option<Mixer> {
        let role = match self {
            Self::LoraA(matrix) | Self::LoraB(matrix) | Self::Scales(matrix) => matrix.role(),
            role => role,
        };
        PARAMETERS.iter().find(|row| row.role == role)?.mixer()
    }
}

impl Matrix {
    /// Returns the names of its modules within a layer or the model; each model has at most one of them.
    pub fn modules(self) -> Vec<&'static str> {
        let rows = PARAMETERS.iter().filter(|row| row.role == self.role());
        let mut modules: Vec<_> = rows.map(ParameterSpec::module).collect();
        modules.dedup();
        modules
    }
}
