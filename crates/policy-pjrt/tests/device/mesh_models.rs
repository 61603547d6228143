//! The models of trainings on meshes, the bounds of their comparisons with one device, and replayed experts.

use crate::mesh_support::{config, loss, on_mesh, sequences};
use crate::mesh_training::SAME;
use crate::support::{
    assert_close, assert_same_gradients, differences, gradients, random, relative_difference, request, runtime, whole,
};
use grpo_models::{
    ClampedSwiglu, Experts, LayerRope, LayerSpec, LinearAttention, LoraConfig, ModelConfig, NamedTensor, SharedExpert,
    SigmoidRouter, TargetModules,
};
use grpo_policy::{
    LogitsProcessors, Policy, RolloutRequest, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all,
};
use grpo_policy_pjrt::decoder::ExpertProducts;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use rstest::rstest;
use std::num::NonZeroUsize;

/// The allowed difference with experts: sums over them have another order, and AdamW divides by small moments.
const EXPERTS: f32 = 2e-5;
/// The allowed difference with Gated DeltaNets, which have long chains of operations.
const DELTA_NETS: f32 = 1e-4;
/// The allowed difference with other heads: the gradient of the queries in layer 3 is a small difference of large terms.
const OTHER_HEADS: f32 = 4e-5;

/// The models of trainings on meshes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    Dense,
    /// Experts as in Qwen3-MoE: without biases, with norms of queries and keys.
    Qwen3Moe,
    /// A first layer without experts, and shared experts with gates.
    Qwen2Moe,
    /// Sigmoid routers with groups, and shared experts without gates.
    Glm4Moe,
    GptOss,
    GatedDeltaNets,
    /// Like Gemma 4.
    OtherHeads,
    /// A vocabulary that is padded, and a head of its own.
    OddVocab,
    /// Fewer key/value heads than tensor shards, with biases and blockwise attention.
    FewKvHeads,
    /// One key/value head, whose query heads are sharded.
    OneKvHead,
}

impl Model {
    pub(crate) const ALL: [Self; 10] = [
        Self::Dense,
        Self::Qwen3Moe,
        Self::Qwen2Moe,
        Self::Glm4Moe,
        Self::GptOss,
        Self::GatedDeltaNets,
        Self::OtherHeads,
        Self::OddVocab,
        Self::FewKvHeads,
        Self::OneKvHead,
    ];

    pub(crate) fn config(self) -> ModelConfig {
        match self {
            Self::Dense => config(),
            Self::Qwen3Moe => with_experts()[0].clone(),
            Self::Qwen2Moe => with_shared_experts(),
            Self::Glm4Moe => with_sigmoid_routers(),
            Self::GptOss => with_experts()[1].clone(),
            Self::GatedDeltaNets => with_gated_delta_nets(),
            Self::OtherHeads => with_other_heads(),
            Self::OddVocab => ModelConfig { vocab_size: 53, tie_word_embeddings: false, ..config() },
            Self::FewKvHeads => ModelConfig { num_attention_heads: 8, attention_bias: true, ..config() },
            Self::OneKvHead => {
                ModelConfig { num_attention_heads: 8, num_key_value_heads: 1, qk_norm: true, ..config() }
            }
        }
    }

    pub(crate) fn has_experts(self) -> bool {
        self.config().experts.is_some()
    }

    /// Returns the allowed difference from one device.
    pub(crate) fn bound(self) -> f32 {
        match self {
            Self::Dense | Self::OddVocab | Self::FewKvHeads | Self::OneKvHead => SAME,
            Self::Qwen3Moe | Self::Qwen2Moe | Self::Glm4Moe | Self::GptOss => EXPERTS,
            Self::GatedDeltaNets => DELTA_NETS,
            Self::OtherHeads => OTHER_HEADS,
        }
    }
}

/// The smallest error of a mesh, two shards of one tensor in each other's place, exceeds the bound of the model tenfold.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::dense(Model::Dense)]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen3_moe(Model::Qwen3Moe)]
#[ignore = "GRPO_TESTS=all"]
#[case::qwen2_moe(Model::Qwen2Moe)]
#[ignore = "GRPO_TESTS=all"]
#[case::glm4_moe(Model::Glm4Moe)]
#[ignore = "GRPO_TESTS=all"]
#[case::gpt_oss(Model::GptOss)]
#[ignore = "GRPO_TESTS=all"]
#[case::gated_delta_nets(Model::GatedDeltaNets)]
#[ignore = "GRPO_TESTS=all"]
#[case::other_heads(Model::OtherHeads)]
#[ignore = "GRPO_TESTS=all"]
#[case::odd_vocab(Model::OddVocab)]
#[ignore = "GRPO_TESTS=all"]
#[case::few_kv_heads(Model::FewKvHeads)]
#[ignore = "GRPO_TESTS=all"]
#[case::one_kv_head(Model::OneKvHead)]
fn two_exchanged_shards_of_any_tensor_exceed_the_bounds(#[case] model: Model) {
    let (config, bound) = (model.config(), model.bound());
    let mut policy =
        PjrtPolicy::new(&on_mesh(&[("fsdp", 8)]), &config, 1, loss(), PjrtPolicyOptions::default()).unwrap();
    let all = sequences();
    let mut weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    // Norms are ones, and biases zeros.
    for (i, tensor) in weights.iter_mut().enumerate().filter(|(_, tensor)| is_constant(tensor)) {
        // Heads with nearly equal decays would hide their exchange.
        let size = if tensor.name.ends_with("dt_bias") { 3.0 } else { 0.1 };
        tensor.data.iter_mut().enumerate().for_each(|(k, value)| *value += size * ((i + 3 * k) as f32).sin());
    }
    let mut evaluate = |weights: &Vec<NamedTensor>| {
        policy.import_weights(weights).unwrap();
        let scores = policy.score(Weights::Policy, &[whole(&all)]).unwrap();
        policy.accumulate(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }).unwrap();
        let gradients = gradients(&mut policy);
        policy.skip().unwrap();
        (scores.logp, gradients)
    };
    let (logp, mut expected) = evaluate(&weights);
    expected.retain(|_, gradient| !is_constant(gradient));
    // An expert of one layer has no tokens.
    let busy: Vec<usize> = (0..weights.len()).filter(|i| expected.contains_key(&weights[*i].name)).collect();
    assert!(busy.len() + 3 >= weights.len(), "{} of {} tensors", busy.len(), weights.len());
    for index in busy {
        let mut exchanged = weights.clone();
        exchange_shards(&mut exchanged[index].data);
        let name = &weights[index].name;
        let (found_logp, mut found) = evaluate(&exchanged);
        found.retain(|name, _| expected.contains_key(name));
        let of_gradients = differences(name, &found, &expected).into_values().fold(0.0, f64::max);
        let off = of_gradients.max(relative_difference(name, &found_logp, &logp));
        println!("error {:.0} bounds: {name}: off by {off:.2e}, bound {bound:.0e}", off / f64::from(bound));
        assert!(off > 10.0 * f64::from(bound), "{name}: off by {off}, expected more than ten times {bound}");
    }
}

/// Exchanges the first shard of eight, or the first value of a head, with the one that differs most.
fn exchange_shards(values: &mut [f32]) {
    let shard = (values.len() / 8).max(1);
    let (first, others) = values.split_at_mut(shard);
    let off = |other: &[f32]| first.iter().zip(other).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    let other = others.chunks_exact_mut(shard).max_by(|a, b| off(a).total_cmp(&off(b))).expect("two shards");
    first.swap_with_slice(other);
}

fn is_constant(tensor: &NamedTensor) -> bool {
    tensor.data.iter().all(|value| *value == tensor.data[0])
}

/// Returns a model like Qwen3-MoE and one like gpt-oss, with eight experts and four key/value heads.
pub(crate) fn with_experts() -> [ModelConfig; 2] {
    // Every expert has tokens.
    let experts = Experts { num_experts: 8, num_experts_per_tok: 5, moe_intermediate_size: 16, ..Experts::default() };
    let config = ModelConfig { num_key_value_heads: 4, experts: Some(experts.clone()), ..config() };
    let qwen3_moe = ModelConfig { attention_bias: false, qk_norm: true, ..config.clone() };
    let gpt_oss = ModelConfig {
        attention_bias: true,
        attention_output_bias: true,
        attention_sinks: true,
        experts: Some(Experts { clamped: Some(ClampedSwiglu::default()), ..experts }),
        ..config
    };
    [qwen3_moe, gpt_oss]
}

/// Returns a model like GLM-4.x, whose first layer has no experts, and whose tokens choose from three of four groups.
fn with_sigmoid_routers() -> ModelConfig {
    let model = with_shared_experts();
    let shared_expert = Some(SharedExpert { intermediate_size: 32, is_gated: false });
    let sigmoid = Some(SigmoidRouter { n_group: 4, topk_group: 3, routed_scaling_factor: 1.5 });
    let experts = model.experts.clone();
    let experts = experts.map(|experts| Experts { shared_expert, sigmoid, norm_topk_prob: true, ..experts });
    ModelConfig { experts, qk_norm: true, partial_rotary_factor: 0.5, ..model }
}

/// Returns a model like Qwen2-MoE, whose first layer has no experts.
fn with_shared_experts() -> ModelConfig {
    let [model, _] = with_experts();
    let shared_expert = Some(SharedExpert { intermediate_size: 24, is_gated: true });
    let experts = model.experts.clone().map(|experts| Experts { shared_expert, norm_topk_prob: false, ..experts });
    let first = LayerSpec { dense_mlp: true, ..LayerSpec::default() };
    let layers = vec![first, LayerSpec::default(), LayerSpec::default()];
    ModelConfig { experts, layers, num_hidden_layers: 3, attention_bias: true, qk_norm: false, ..model }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::dense_products(&[("fsdp", 4), ("tensor", 2)], ExpertProducts::Dense)]
#[ignore = "GRPO_TESTS=all"]
#[case::grouped_products(&[("data", 4), ("tensor", 2)], ExpertProducts::Grouped { rows: NonZeroUsize::new(4) })]
fn replayed_experts_on_meshes_match_one_device(
    #[case] axes: &[(&'static str, usize)],
    #[case] products: ExpertProducts,
) {
    let [_, config] = with_experts();
    let on = |runtime: &Runtime, expert_products| {
        let options = PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() };
        let mut policy = PjrtPolicy::new(runtime, &config, 1, loss(), options).unwrap();
        let prompts = [vec![1, 5, 6], vec![9], vec![3, 4]];
        let sampling = random(1.0, LogitsProcessors::default(), 0);
        let of_request = request(&prompts, 2, 9, &[2], sampling);
        let completions = policy.generate(&RolloutRequest { return_routed_experts: true, ..of_request }).unwrap();
        let pairs = completions.iter().enumerate().map(|(i, completion)| {
            let prompt = prompts[i / 2].clone();
            // Other experts than the router chooses.
            let mut routed = completion.routed_experts.clone();
            routed.ids.iter_mut().for_each(|id| *id = (*id + 1) % 8);
            (Sequence { prompt, completion: completion.ids.clone() }, routed)
        });
        let (sequences, routed): (Vec<_>, Vec<_>) = pairs.unzip();
        let batch = || SequenceBatch { routed_experts: &routed, ..whole(&sequences) };
        let tokens = batch().tokens.tokens();
        let output = policy.accumulate(&[batch()], StepLoss::CrossEntropy { tokens }).unwrap();
        let mismatch = output.metrics.value("moe/routing_mismatch").unwrap();
        assert!(mismatch > 0.5, "{mismatch}");
        (completions, output.loss as f32, mismatch as f32, gradients(&mut policy))
    };
    let (completions, loss, mismatch, expected) = on(runtime(), ExpertProducts::Dense);
    let (found, of_mesh, of_routers, gradients) = on(&on_mesh(axes), products);
    let ids = |all: &[grpo_policy::Completion]| {
        all.iter().map(|c| (c.ids.clone(), c.routed_experts.clone())).collect::<Vec<_>>()
    };
    assert_eq!(ids(&found), ids(&completions));
    assert_close("loss and mismatch", &[of_mesh, of_routers], &[loss, mismatch], 1e-5);
    assert_same_gradients("gradients", &gradients, &expected, EXPERTS);
}

/// Returns adapters of the experts alone. A larger factor would amplify rounding errors, too.
pub(crate) fn of_experts() -> LoraConfig {
    LoraConfig {
        r: 2,
        lora_alpha: 2.0,
        target_modules: TargetModules::Names(vec![]),
        target_parameters: ["experts.gate_up_proj", "experts.down_proj"].map(String::from).to_vec(),
        ..LoraConfig::default()
    }
}

/// Returns a model with Gated DeltaNets, whose last period of layers is incomplete.
fn with_gated_delta_nets() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 3,
        layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
        linear_attention: Some(LinearAttention {
            linear_key_head_dim: 4,
            linear_value_head_dim: 8,
            ..LinearAttention::default()
        }),
        attention_bias: false,
        attention_output_gate: true,
        qk_norm: true,
        zero_centered_norms: true,
        partial_rotary_factor: 0.5,
        ..config()
    }
}

#[test]
fn key_heads_that_do_not_divide_are_an_error() {
    let config = with_gated_delta_nets();
    let one_head = LinearAttention { linear_num_key_heads: 1, ..config.linear_attention.unwrap() };
    let config = ModelConfig { linear_attention: Some(one_head), ..config };
    let policy = PjrtPolicy::new(&on_mesh(&[("tensor", 2)]), &config, 1, loss(), PjrtPolicyOptions::default());
    let error = policy.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("the key heads of Gated DeltaNets"), "{error}");
}

/// Returns a model like Gemma 4: layers with windows, others with wider heads whose keys are the values.
fn with_other_heads() -> ModelConfig {
    let sliding = LayerSpec { sliding_window: Some(3), rope: LayerRope::Local, ..LayerSpec::default() };
    let full = LayerSpec { head_dim: Some(8), keys_are_values: true, ..LayerSpec::default() };
    ModelConfig {
        num_hidden_layers: 5,
        layers: vec![sliding, full, full],
        attention_bias: false,
        qk_norm: true,
        value_norm: true,
        layer_scalars: true,
        final_logit_softcapping: Some(2.0),
        ..config()
    }
}
