//! The parameters of a configuration.

use super::{Axis, Format, Names, Parameter, Role};
use grpo_models::{LayerSpec, ModelConfig};

/// Returns the parameters of a decoder, in the argument order of programs.
pub fn parameters(config: &ModelConfig) -> Vec<Parameter> {
    use Axis::{ChannelInput, One, QueryHead, RouterExperts, Taps, ValueDim, Vocab};
    use Axis::{Channels, Embed, Experts, FusedHeads, FusedMlp, HeadDim, Heads, Kv, Layer, LinearHeads, Mlp};
    let linear = config.linear_attention.unwrap_or_default();
    let experts = config.experts.as_ref();
    let (wide, count) = experts.map_or((0, 0), |experts| (experts.moe_intermediate_size, experts.num_experts));
    let shared = experts.and_then(|experts| experts.shared_expert);
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
        Mlp if role.is_of_experts() => wide,
        Mlp if matches!(role, Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj) => {
            shared.map_or(0, |shared| shared.intermediate_size)
        }
        FusedMlp if role.is_of_experts() => 2 * wide,
        Mlp => config.intermediate_size,
        FusedMlp => 2 * config.intermediate_size,
        Experts | RouterExperts => count,
        Vocab => config.vocab_size,
        Layer
        | Axis::HeadsBias { .. }
        | Axis::KvBias { .. }
        | Axis::Packed { .. }
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
        Role::GateProj | Role::UpProj => (experts.is_none() || spec.dense_mlp) && !config.fused_projections,
        Role::GateUpProj => experts.is_none() && config.fused_projections,
        Role::DownProj => experts.is_none() || spec.dense_mlp,
        Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj => {
            shared.is_some_and(|shared| shared.is_gated == path.starts_with("mlp.shared_expert.")) && !spec.dense_mlp
        }
        Role::SharedGate => shared.is_some_and(|shared| shared.is_gated) && !spec.dense_mlp,
        Role::Router | Role::RouterBias | Role::CorrectionBias if spec.dense_mlp => false,
        Role::CorrectionBias => experts.is_some_and(|experts| experts.sigmoid.is_some()),
        role if role.is_of_experts() && spec.dense_mlp => false,
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
    let all: [(Role, &'static str, &[Axis]); 51] = [
        // Factors of layers and routers come first, because trained parameters come last, and routers may be frozen.
        (Role::LayerScalar, "layer_scalar", &[Layer, One]),
        (Role::CorrectionBias, "mlp.gate.e_score_correction_bias", &[Layer, RouterExperts]),
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
        (Role::SharedGateProj, "mlp.shared_expert.gate_proj.weight", &[Layer, Mlp, Embed]),
        (Role::SharedGateProj, "mlp.shared_experts.gate_proj.weight", &[Layer, Mlp, Embed]),
        (Role::SharedUpProj, "mlp.shared_expert.up_proj.weight", &[Layer, Mlp, Embed]),
        (Role::SharedUpProj, "mlp.shared_experts.up_proj.weight", &[Layer, Mlp, Embed]),
        (Role::SharedDownProj, "mlp.shared_expert.down_proj.weight", &[Layer, Embed, Mlp]),
        (Role::SharedDownProj, "mlp.shared_experts.down_proj.weight", &[Layer, Embed, Mlp]),
        (Role::SharedGate, "mlp.shared_expert_gate.weight", &[Layer, One, Embed]),
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
            Parameter { role, number, layers, shape, axes, padding: 0, format, path, names, stacked }
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
                vec![Parameter { role, number: 0, layers, shape, axes, padding: 0, format, path, names, stacked: 0 }]
            }
        })
        .collect()
}
