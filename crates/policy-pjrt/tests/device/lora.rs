//! LoRA: the adapted model matches peft and the CPU policy, only adapters are trained, and the reference policy is the base model.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::gradients::{batches, by_name, gradients, host_gradients, on_device, policy_loss};
use crate::support::{assert_close, runtime};
use grpo_core::LossConfig;
use models::{Adapter, LoraConfig, NamedTensor, TargetModules};
use policy::{AdamWConfig, Policy, PolicyState, RolloutRequest, Sampling, StateGroup, StepLoss, Weights, export_all};
use policy_cpu::CpuPolicy;
use policy_pjrt::decoder::Compute;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};

fn lora(r: usize, target_modules: TargetModules) -> LoraConfig {
    LoraConfig { r, target_modules, ..LoraConfig::default() }
}

fn all_linear() -> TargetModules {
    TargetModules::Pattern("all-linear".into())
}

fn names(names: &[&str]) -> TargetModules {
    TargetModules::Names(names.iter().map(|name| (*name).into()).collect())
}

fn host(checkpoint: &Checkpoint, lora: &LoraConfig) -> CpuPolicy {
    CpuPolicy::mapped_with_lora(checkpoint.config(), &checkpoint.weights, lora, 7, policy_loss()).unwrap()
}

fn device(checkpoint: &Checkpoint, lora: &LoraConfig, options: PjrtPolicyOptions) -> PjrtPolicy {
    let (config, weights, loss) = (checkpoint.config(), &checkpoint.weights, LossConfig::default());
    PjrtPolicy::from_weights_with_lora(runtime(), config, weights, lora, 7, loss, options).unwrap()
}

fn weights(policy: &dyn Policy) -> Vec<NamedTensor> {
    export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap()
}

fn state(policy: &dyn Policy) -> [Vec<NamedTensor>; 3] {
    let of = StateGroup::Weights;
    [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer].map(|group| export_all(policy, group).unwrap())
}

/// Returns the adapters with nonzero B.
fn moved(policy: &dyn Policy) -> Vec<NamedTensor> {
    let mut weights = weights(policy);
    for (i, tensor) in weights.iter_mut().enumerate().filter(|(_, tensor)| tensor.name.contains(".lora_B.")) {
        let values = tensor.data.iter_mut().enumerate();
        values.for_each(|(k, value)| *value = 0.1 * ((i + 2 * k) as f32).sin());
    }
    weights
}

fn adamw() -> AdamWConfig {
    // A large epsilon: AdamW divides by it where gradients are small, so their differences stay within 1e-5 of the largest entry.
    AdamWConfig { adam_epsilon: 1e-2, ..AdamWConfig::default() }
}

/// Imports weights, moments and a step count; the reference policy is the base model.
fn import(policy: &mut dyn Policy, weights: &[NamedTensor], optimizer: &[NamedTensor], optimizer_steps: u64) {
    let adamw = adamw();
    let state =
        PolicyState { policy: &weights, ref_policy: Some(&[]), optimizer: &optimizer, optimizer_steps, adamw: &adamw };
    policy.import(&state).unwrap();
}

#[track_caller]
fn assert_same_tensors(what: &str, found: Vec<NamedTensor>, expected: Vec<NamedTensor>, tolerance: f32) {
    let (found, expected) = (by_name(found), by_name(expected));
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, expected) in expected {
        assert_eq!(found[&name].shape, expected.shape, "{what}: {name}");
        assert_close(&format!("{what}: {name}"), &found[&name].data, &expected.data, tolerance);
    }
}

#[test]
fn gradients_and_merged_weights_of_a_peft_adapter_match_peft() {
    let checkpoint = Checkpoint::open("llama3");
    let folder = checkpoint::folder("llama3_lora");
    let expected = Tensors::read(&folder.join("expected.safetensors")).0;
    let adapter = Adapter::open(&folder, checkpoint.config()).unwrap();
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default()).with_adapter(&adapter).unwrap();
    let sequences = checkpoint.completions();
    let tokens = sequences.iter().map(|s| s.completion.len()).sum();
    let loss = policy.accumulate(&batches(&sequences), StepLoss::CrossEntropy { tokens }).unwrap().loss;
    let of_peft = f64::from(expected["expected.loss"].data[0]);
    assert!((loss - of_peft).abs() < 1e-5 * of_peft, "{loss} {of_peft}");
    let found = gradients(&mut policy);
    let of_peft: Vec<_> = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t))).collect();
    assert_eq!((of_peft.len(), found.len()), (2 * (5 * 2 + 1), 2 * (5 * 2 + 1)));
    for (name, expected) in of_peft {
        assert_eq!(found[name].shape, expected.shape, "{name}");
        assert_close(name, &found[name].data, &expected.data, 1e-4);
    }

    let (mut tensors, mut merged) = (Vec::new(), Vec::new());
    policy.export_adapter(&mut tensors).unwrap();
    let tensors = by_name(tensors);
    assert_eq!(tensors.len(), 2 * adapter.matrices().len());
    for matrix in adapter.matrices() {
        for (name, stored) in [(matrix.lora_a(), adapter.lora_a(matrix)), (matrix.lora_b(), adapter.lora_b(matrix))] {
            assert_eq!(tensors[&name].data, stored.unwrap().to_vec(), "{name}");
        }
    }
    policy.export_model(&mut merged).unwrap();
    let expected = Tensors::read(&folder.join("merged.safetensors")).0;
    assert_eq!(merged.len(), expected.len());
    for tensor in &merged {
        let expected = &expected[&tensor.name];
        assert_eq!(tensor.shape, expected.shape);
        let off = tensor.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-6, "{}: off by {off}", tensor.name);
    }
}

/// Every family and every kind of target modules: scores of both policies, gradients, a step, checkpoints from the CPU to the device and
/// back, samples.
#[test]
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
    ] {
        let checkpoint = Checkpoint::open(name);
        let what = format!("{name}, {:?}", lora.target_modules);
        let (mut host, mut device) =
            (host(&checkpoint, &lora), device(&checkpoint, &lora, PjrtPolicyOptions::default()));
        assert_eq!(device.num_parameters(), host.num_parameters(), "{what}");
        assert_eq!(by_name(weights(&device)), by_name(weights(&host)), "{what}: the same first adapters");
        let start = moved(&host);
        for policy in [&mut host as &mut dyn Policy, &mut device] {
            import(policy, &start, &[], 0);
            assert!(policy.has_ref_policy());
        }

        let sequences = checkpoint.completions();
        let (parts, tokens) = (batches(&sequences), sequences.iter().map(|s| s.completion.len()).sum());
        let scores = |policy: &mut dyn Policy, of| policy.score(of, &parts).unwrap();
        for of in [Weights::Policy, Weights::RefPolicy] {
            let (found, expected) = (scores(&mut device, of), scores(&mut host, of));
            assert_close(&format!("{what}: {of:?}"), &found.logp, &expected.logp, 1e-5);
            assert_close(&format!("{what}: {of:?}"), &found.entropy, &expected.entropy, 1e-5);
        }
        let beneath = scores(&mut device, Weights::RefPolicy);
        assert_ne!(scores(&mut device, Weights::Policy).logp, beneath.logp, "{what}");

        let step = StepLoss::CrossEntropy { tokens };
        let [expected, found] =
            [&mut host as &mut dyn Policy, &mut device].map(|policy| policy.accumulate(&parts, step).unwrap().loss);
        assert!((found - expected).abs() < 1e-5 * expected, "{what}: {found} {expected}");
        let of_device = gradients(&mut device).into_values().collect();
        assert_same_tensors(&what, of_device, host_gradients(&host).into_values().collect(), 1e-5);
        let [expected, found] = [&mut host as &mut dyn Policy, &mut device].map(|policy| policy.apply(0.01).unwrap());
        assert!(found.applied && (found.grad_norm - expected.grad_norm).abs() < 1e-5 * expected.grad_norm, "{what}");
        let [stepped, _, moments] = state(&device);
        assert_same_tensors(&what, stepped.clone(), weights(&host), 1e-5);
        assert_same_tensors(&what, moments.clone(), state(&host)[2].clone(), 2e-5);
        assert_eq!(scores(&mut device, Weights::RefPolicy), beneath, "{what}: the base model changed");

        // Import on the CPU, and one step on both.
        import(&mut host, &stepped, &moments, 1);
        for policy in [&mut host as &mut dyn Policy, &mut device] {
            policy.accumulate(&parts, step).unwrap();
            policy.apply(0.01).unwrap();
        }
        assert_same_tensors(&what, weights(&device), weights(&host), 2e-5);

        let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23]];
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 2,
            max_completion_length: 6,
            stop_ids: &[],
            stop: None,
            sampling: Sampling::Greedy,
        };
        let (found, expected) = (device.generate(&request).unwrap(), host.generate(&request).unwrap());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.ids, expected.ids, "{what}");
            assert_close(&what, &found.logps, &expected.logps, 1e-4);
        }

        let exported = |policy: &dyn Policy| {
            let mut model = Vec::new();
            policy.export_model(&mut model).unwrap();
            model
        };
        let (found, expected) = (exported(&device), exported(&host));
        let merged = lora.merged_into(checkpoint.config()).unwrap();
        assert_eq!(by_name(found.clone()).len(), merged.parameters().len(), "{what}");
        assert_same_tensors(&what, found, expected, 2e-5);
    }
}

#[test]
fn policy_and_reference_share_the_frozen_bf16_model() {
    let checkpoint = Checkpoint::open("llama3_bf16");
    let options = PjrtPolicyOptions { compute: Compute::Bf16, ..PjrtPolicyOptions::default() };
    let mut policy = device(&checkpoint, &lora(2, all_linear()), options);
    assert_eq!(policy.weights().unwrap().dtype(), stablehlo::Dtype::Bf16);
    let before = policy.weights().unwrap().clone();
    policy.freeze_ref_policy().unwrap();
    let sequences = checkpoint.completions();
    policy.accumulate(&batches(&sequences), StepLoss::CrossEntropy { tokens: 50 }).unwrap();
    assert!(policy.apply(0.05).unwrap().applied);
    let after = policy.weights().unwrap();
    for ((parameter, before), after) in before.table().iter().zip(before.buffers()).zip(after.buffers()) {
        let (shared, of_model) = (std::sync::Arc::ptr_eq(before, after), parameter.role.is_of_model());
        assert_eq!(shared, of_model, "{}", parameter.name());
    }
}

#[test]
fn lora_errors_name_the_cause() {
    let checkpoint = Checkpoint::open("qwen2");
    let plain = on_device(&checkpoint, PjrtPolicyOptions::default());
    let text = plain.with_lora(&lora(2, names(&["c_attn"])), 1).err().unwrap().to_string();
    assert!(text.contains("c_attn"), "{text}");
}
