//! LoRA: the adapted model matches peft and the CPU policy, only adapters are trained, and the reference policy is the base model.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::support::{
    assert_close, assert_near, assert_same_scores, assert_same_tensors, both, by_name, cross_entropy,
    expected_gradients, exported, gradients, halves, host_gradients, host_loss, import, moved, narrow, on_device,
    request, runtime, state, to_host, weights,
};
use grpo_core::LossConfig;
use grpo_models::{Adapter, LoraConfig, TargetModules};
use grpo_policy::{OptimizerSettings, Policy, Sampling, Weights};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::decoder::ExpertProducts;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use grpo_testkit::margin::assert_below;
use std::num::NonZeroUsize;

fn lora(r: usize, target_modules: TargetModules) -> LoraConfig {
    LoraConfig { r, target_modules, ..LoraConfig::default() }
}

fn all_linear() -> TargetModules {
    TargetModules::Pattern("all-linear".into())
}

fn names(names: &[&str]) -> TargetModules {
    TargetModules::Names(names.iter().map(|name| (*name).into()).collect())
}

/// Returns adapters of rank 3 of these matrices and of these parameters of experts.
fn of_experts(modules: &[&str], parameters: &[&str]) -> LoraConfig {
    let target_parameters = parameters.iter().map(|name| (*name).into()).collect();
    LoraConfig { target_parameters, ..lora(3, names(modules)) }
}

/// Returns options with products of experts in blocks of these rows.
fn grouped(rows: usize) -> PjrtPolicyOptions {
    let expert_products = ExpertProducts::Grouped { rows: NonZeroUsize::new(rows) };
    PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() }
}

fn host(checkpoint: &Checkpoint, lora: &LoraConfig) -> CpuPolicy {
    let loss = host_loss(LossConfig::default());
    CpuPolicy::mapped_with_lora(checkpoint.config(), &checkpoint.weights, lora, 7, loss).unwrap()
}

fn device(checkpoint: &Checkpoint, lora: &LoraConfig, options: PjrtPolicyOptions) -> PjrtPolicy {
    let (config, weights, loss) = (checkpoint.config(), &checkpoint.weights, LossConfig::default());
    PjrtPolicy::from_weights_with_lora(runtime(), config, weights, lora, 7, loss, options).unwrap()
}

#[test]
fn gradients_and_merged_weights_of_two_peft_adapters_match_peft() {
    assert_like_peft([of_layers("llama3"), ("gpt_oss", "gpt_oss_experts_lora".into(), grouped(2))]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn gradients_and_merged_weights_of_every_peft_adapter_match_peft() {
    let with_experts = ["qwen3_moe", "qwen3_moe_fused", "gpt_oss"].into_iter().flat_map(|name| {
        let folder = format!("{name}_experts_lora");
        [PjrtPolicyOptions::default(), grouped(2)].map(|options| (name, folder.clone(), options))
    });
    assert_like_peft(checkpoint::ADAPTED.into_iter().map(of_layers).chain(with_experts));
}

/// A base model, the folder of its adapter, and options.
type Adapted = (&'static str, String, PjrtPolicyOptions);

fn of_layers(name: &'static str) -> Adapted {
    (name, format!("{name}_lora"), PjrtPolicyOptions::default())
}

fn assert_like_peft(adapted: impl IntoIterator<Item = Adapted>) {
    for (base, name, options) in adapted {
        let checkpoint = Checkpoint::open(base);
        let folder = checkpoint::folder(&name);
        let expected = Tensors::read(&folder.join("expected.safetensors"));
        let adapter = Adapter::open(&folder, checkpoint.config()).unwrap();
        let name = &format!("{name}, {:?}", options.expert_products);
        let mut policy = on_device(&checkpoint, options).with_adapter(&adapter).unwrap();
        let sequences = checkpoint.completions();
        let loss = policy.accumulate(&halves(&sequences), cross_entropy(&sequences)).unwrap().loss;
        assert_near(name, loss, expected.0["expected.loss"].data[0].into());
        let found = gradients(&mut policy);
        assert_eq!(found.len(), 2 * adapter.matrices().len(), "{name}");
        assert_same_tensors(name, &found, &expected_gradients(&expected), 1e-4);

        let mut tensors = Vec::new();
        policy.export_adapter(&mut tensors).unwrap();
        let tensors = by_name(tensors);
        assert_eq!(tensors.len(), 2 * adapter.matrices().len());
        for matrix in adapter.matrices() {
            for (name, stored) in [(matrix.lora_a(), adapter.lora_a(matrix)), (matrix.lora_b(), adapter.lora_b(matrix))]
            {
                let stored = stored.unwrap();
                assert_eq!(
                    (&tensors[&name].shape[..], &tensors[&name].data),
                    (stored.shape(), &stored.to_vec()),
                    "{name}"
                );
            }
        }
        let (merged, expected) = (exported(&policy), Tensors::read(&folder.join("merged.safetensors")).0);
        assert_eq!(merged.len(), expected.len(), "{name}");
        for (tensor, found) in &merged {
            assert_eq!(found.shape, expected[tensor].shape);
            let off = found.data.iter().zip(&expected[tensor].data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert_below(&format!("{name}: {tensor}"), off.into(), 1e-6);
        }
    }
}

#[test]
fn adapters_of_the_head_and_of_layers_match_the_cpu_policy() {
    let with_head = lora(2, names(&["o_proj", "down_proj", "lm_head"]));
    assert_like_the_cpu_policy("granite", &with_head, PjrtPolicyOptions::default());
}

/// Every family and every kind of target modules.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn adapters_of_every_family_match_the_cpu_policy() {
    let of_first_layer = || TargetModules::Pattern(r"model\.layers\.0\..*_proj".into());
    for (name, lora) in [
        ("qwen2", lora(3, all_linear())),
        ("qwen2", lora(2, names(&["lm_head"]))),
        ("qwen2_5_sharded", lora(2, names(&["v_proj", "down_proj", "lm_head"]))),
        ("qwen3", lora(4, of_first_layer())),
        ("qwen3_f16", LoraConfig { use_rslora: true, ..lora(2, names(&["q_proj", "o_proj"])) }),
        ("llama3", lora(3, names(&["k_proj", "gate_proj", "up_proj"]))),
        ("llama3_bf16", lora(3, all_linear())),
        ("llama3_bf16", lora(2, names(&["up_proj", "lm_head"]))),
        ("mistral", lora(2, all_linear())),
        ("smollm3", lora(2, names(&["q_proj", "up_proj"]))),
        ("olmo3", lora(2, all_linear())),
        ("phi3", lora(2, names(&["gate_up_proj", "qkv_proj"]))),
        ("gemma3", lora(2, all_linear())),
        ("gemma4", lora(2, all_linear())),
        ("gemma4_vision", lora(2, names(&["v_proj", "down_proj"]))),
    ] {
        assert_like_the_cpu_policy(name, &lora, PjrtPolicyOptions::default());
    }
}

const OF_EXPERTS: [&str; 2] = ["experts.gate_up_proj", "experts.down_proj"];

#[test]
fn adapters_of_experts_in_blocks_match_the_cpu_policy() {
    assert_like_the_cpu_policy("qwen3_moe", &of_experts(&["q_proj"], &OF_EXPERTS), grouped(2));
}

/// All experts, and those of one layer; dense products, and products in blocks.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn adapters_of_experts_match_the_cpu_policy() {
    let both = OF_EXPERTS;
    for (name, lora, options) in [
        ("gpt_oss", of_experts(&["o_proj"], &both), PjrtPolicyOptions::default()),
        ("gpt_oss", of_experts(&[], &both[1..]), grouped(3)),
        ("qwen3_moe", of_experts(&[], &["model.layers.1.mlp.experts.gate_up_proj"]), PjrtPolicyOptions::default()),
    ] {
        assert_like_the_cpu_policy(name, &lora, options);
    }
}

/// Compares scores of both policies, gradients, a step, checkpoints from the CPU to the device and back, and samples.
#[track_caller]
fn assert_like_the_cpu_policy(name: &str, lora: &LoraConfig, options: PjrtPolicyOptions) {
    // A learning rate below epsilon does not amplify differences of gradients.
    let adamw = OptimizerSettings { adam_epsilon: 0.1, ..OptimizerSettings::default() };
    let checkpoint = Checkpoint::open(name);
    let what = format!("{name}, {:?}, {:?}", lora.target_modules, lora.target_parameters);
    let (mut device, mut host) = (device(&checkpoint, lora, options), host(&checkpoint, lora));
    assert_eq!(device.num_parameters(), host.num_parameters(), "{what}");
    assert_eq!(weights(&device), weights(&host), "{what}: the same first adapters");
    let start = moved(&host, 0.1);
    both(&mut device, &mut host, |policy| {
        // The reference policy is the base model.
        import(policy, &start, Some(&[]), &[], 0, &adamw);
        assert!(policy.has_ref_policy());
    });

    let sequences = checkpoint.completions();
    let (parts, loss) = (halves(&sequences), cross_entropy(&sequences));
    let [policies, references] = [Weights::Policy, Weights::RefPolicy].map(|of| {
        let scores = both(&mut device, &mut host, |policy| policy.score(of, &parts).unwrap());
        assert_same_scores(&format!("{what}: {of:?}"), &scores[0], &scores[1]);
        scores
    });
    assert_ne!(policies[0].logp, references[0].logp, "{what}");

    let [found, expected] = both(&mut device, &mut host, |policy| policy.accumulate(&parts, loss).unwrap().loss);
    assert_near(&what, found, expected);
    let tolerance = to_host(name);
    assert_same_tensors(&what, &gradients(&mut device), &host_gradients(&host), tolerance);
    let [found, expected] = both(&mut device, &mut host, |policy| policy.apply(0.01).unwrap());
    assert!(found.applied, "{what}");
    assert_near(&what, found.grad_norm, expected.grad_norm);
    assert_same_tensors(&what, &weights(&device), &weights(&host), tolerance);
    let ([stepped, _, moments], [_, _, of_host]) = (state(&device), state(&host));
    assert_same_tensors(&what, &by_name(moments.clone()), &by_name(of_host), 2.0 * tolerance);
    let of_ref = device.score(Weights::RefPolicy, &parts).unwrap();
    assert_eq!(of_ref, references[0], "{what}: the base model changed");

    // Import on the CPU, and one step on both.
    import(&mut host, &stepped, Some(&[]), &moments, 1, &adamw);
    both(&mut device, &mut host, |policy| {
        policy.accumulate(&parts, loss).unwrap();
        policy.apply(0.01).unwrap();
    });
    assert_same_tensors(&what, &weights(&device), &weights(&host), 2.0 * tolerance);

    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23]];
    let request = request(&prompts, 2, 6, &[], Sampling::Greedy);
    let [found, expected] = both(&mut device, &mut host, |policy| policy.generate(&request).unwrap());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.ids, expected.ids, "{what}");
        assert_close(&what, &found.logps, &expected.logps, 1e-4);
    }
    let found = exported(&device);
    assert_eq!(found.len(), lora.merged_into(checkpoint.config()).unwrap().parameters().len(), "{what}");
    assert_same_tensors(&what, &found, &exported(&host), 2.0 * tolerance);
}

#[test]
fn policy_and_reference_share_the_frozen_bf16_model() {
    let checkpoint = Checkpoint::open("llama3_bf16");
    let mut policy = device(&checkpoint, &lora(2, all_linear()), narrow());
    assert_eq!(policy.weights().unwrap().dtype(), grpo_stablehlo::Dtype::Bf16);
    let before = policy.weights().unwrap().clone();
    policy.freeze_ref_policy().unwrap();
    let sequences = checkpoint.completions();
    policy.accumulate(&halves(&sequences), cross_entropy(&sequences)).unwrap();
    assert!(policy.apply(0.05).unwrap().applied);
    let after = policy.weights().unwrap();
    for ((parameter, before), after) in before.table().iter().zip(before.tensors()).zip(after.tensors()) {
        let (shared, of_model) = (std::sync::Arc::ptr_eq(before, after), parameter.role.is_of_model());
        assert_eq!(shared, of_model, "{}", parameter.name());
    }
}
