//! Every model family: gradients and one optimizer step match torch and the CPU policy.

use crate::checkpoint::{self, Checkpoint, Settings, Tensors};
use crate::support::{assert_close, runtime};
use grpo_core::LossConfig;
use models::{ModelConfig, NamedTensor};
use policy::{
    AdamWConfig, Policy, PolicyState, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch,
};
use policy_cpu::{CpuPolicy, PolicyLoss};
use policy_pjrt::decoder::{ATTENTION, Attention};
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use stablehlo::Save;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

pub(crate) fn on_device(checkpoint: &Checkpoint, options: PjrtPolicyOptions) -> PjrtPolicy {
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    PjrtPolicy::from_weights(runtime(), config, weights, LossConfig::default(), options).unwrap()
}

pub(crate) fn policy_loss() -> PolicyLoss {
    PolicyLoss {
        config: LossConfig::default().into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    }
}

fn on_host(checkpoint: &Checkpoint) -> CpuPolicy {
    CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, policy_loss()).unwrap()
}

/// Splits the sequences into two micro-batches; one sequence is one micro-batch.
pub(crate) fn batches(sequences: &[Sequence]) -> Vec<SequenceBatch<'_>> {
    let parts = sequences.chunks(sequences.len().div_ceil(2));
    parts.map(|sequences| SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() }).collect()
}

pub(crate) fn by_name(tensors: Vec<NamedTensor>) -> BTreeMap<String, NamedTensor> {
    tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect()
}

pub(crate) fn gradients(policy: &mut PjrtPolicy) -> BTreeMap<String, NamedTensor> {
    let mut gradients = Vec::new();
    policy.export_gradients(&mut gradients).unwrap();
    by_name(gradients)
}

/// Returns the gradients of a CPU policy with the names of transformers and PEFT.
pub(crate) fn host_gradients(host: &CpuPolicy) -> BTreeMap<String, NamedTensor> {
    let mut of_host = Vec::new();
    host.model().export_values(host.gradients().parameters(), &mut of_host).unwrap();
    by_name(of_host)
}

#[test]
fn gradients_of_every_parameter_match_torch_and_the_cpu_policy() {
    assert_gradients(|_| PjrtPolicyOptions::default());
}

#[test]
fn gradients_of_blockwise_attention_match_torch_and_the_cpu_policy() {
    let block = NonZeroUsize::new(4).unwrap();
    assert_gradients(|_| PjrtPolicyOptions { attention: Attention::Blockwise { block }, ..Default::default() });
}

#[test]
fn gradients_with_saved_attention_match_torch_and_the_cpu_policy() {
    let block = NonZeroUsize::new(4).unwrap();
    assert_gradients(|_| PjrtPolicyOptions {
        attention: Attention::Blockwise { block },
        save: Save::Named(vec![ATTENTION.into()]),
        ..Default::default()
    });
}

#[test]
fn gradients_with_one_group_of_layers_match_torch_and_the_cpu_policy() {
    let all = |config: &ModelConfig| Save::Every(config.num_hidden_layers);
    assert_gradients(|config| PjrtPolicyOptions { save: all(config), ..Default::default() });
}

#[test]
fn gradients_with_every_save_policy_match_torch_and_the_cpu_policy() {
    let mut saves = [Save::Carry, Save::Every(2), Save::Products, Save::Everything].into_iter().cycle();
    assert_gradients(|_| PjrtPolicyOptions { save: saves.next().unwrap(), ..Default::default() });
}

fn assert_gradients(mut options: impl FnMut(&ModelConfig) -> PjrtPolicyOptions) {
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.completions();
        let (parts, tokens) = (batches(&sequences), sequences.iter().map(|s| s.completion.len()).sum());
        let mut policy = on_device(&checkpoint, options(checkpoint.config()));
        let loss = policy.accumulate(&parts, StepLoss::CrossEntropy { tokens }).unwrap().loss;
        let expected = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert!((loss - expected).abs() < 1e-5 * expected, "{name}: {loss} {expected}");
        let found = gradients(&mut policy);

        let mut host = on_host(&checkpoint);
        host.accumulate(&parts, StepLoss::CrossEntropy { tokens }).unwrap();
        let of_host = host_gradients(&host);

        let of_torch = checkpoint.expected.0.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, expected) in of_torch {
            let gradient = &found[parameter];
            assert_eq!(gradient.shape, expected.shape, "{name}: {parameter}");
            assert_close(&format!("{name}: {parameter}, torch"), &gradient.data, &expected.data, 1e-4);
            assert_close(&format!("{name}: {parameter}, host"), &gradient.data, &of_host[parameter].data, 1e-5);
            compared += 1;
        }
        assert_eq!((compared, of_host.len()), (found.len(), found.len()), "{name}");
    }
}

#[test]
fn an_optimizer_step_matches_torch() {
    let mut steps = 0;
    for name in checkpoint::ALL {
        let checkpoint = Checkpoint::open(name);
        let path = checkpoint.folder.path().join("adamw.safetensors");
        if !path.exists() {
            continue;
        }
        steps += 1;
        let settings = Settings::read(&path);
        let (adamw, setting) = (settings.adamw(), |key: &str| settings.number(key));
        let sequences = checkpoint.completions();
        let tokens = sequences.iter().map(|s| s.completion.len()).sum();
        let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
        policy.reset_optimizer(&adamw).unwrap();
        policy.accumulate(&batches(&sequences), StepLoss::CrossEntropy { tokens }).unwrap();
        let report = policy.apply(setting("lr")).unwrap();
        assert!(report.applied && report.grad_norm > 2.0 * adamw.max_grad_norm, "{name}: the gradient is not clipped");

        let expected = Tensors::read(&path).0;
        let mut found = Vec::new();
        policy.export_model(&mut found).unwrap();
        assert_eq!(found.len(), expected.len(), "{name}");
        for NamedTensor { name: parameter, shape, data } in found {
            let (expected, before) = (&expected[&parameter], checkpoint.weights.tensor(&parameter).unwrap().to_vec());
            assert_eq!(shape, expected.shape, "{name}: {parameter}");
            // Compare updates, not weights.
            let step = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            let expected = step(&expected.data);
            assert!(expected.iter().any(|x| x.abs() > 1e-3), "{name}: {parameter}: no step");
            assert_close(&format!("{name}: {parameter}"), &step(&data), &expected, 2e-4);
        }
    }
    assert_eq!(steps, 5);
}

#[test]
fn checkpoints_match_the_cpu_policy() {
    let groups = [StateGroup::Weights(Weights::Policy), StateGroup::Optimizer];
    for name in ["qwen2", "qwen2_5_sharded", "qwen3", "llama3"] {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.completions();
        let (parts, adamw) = (batches(&sequences), AdamWConfig { adam_epsilon: 1e-3, ..AdamWConfig::default() });
        let (mut host, mut device) = (on_host(&checkpoint), on_device(&checkpoint, PjrtPolicyOptions::default()));
        let weights = |policy: &dyn Policy| by_name(export_all(policy, groups[0]).unwrap());
        assert_eq!(weights(&device), weights(&host), "{name}");
        // One step on the CPU, import on the device, and one step on both.
        host.reset_optimizer(&adamw).unwrap();
        let step = |policy: &mut dyn Policy| {
            policy.accumulate(&parts, StepLoss::CrossEntropy { tokens: 50 }).unwrap();
            policy.apply(0.01).unwrap();
        };
        step(&mut host);
        let [policy, optimizer] = groups.map(|group| export_all(&host, group).unwrap());
        let state =
            PolicyState { policy: &policy, ref_policy: None, optimizer: &optimizer, optimizer_steps: 1, adamw: &adamw };
        device.import(&state).unwrap();
        step(&mut host);
        step(&mut device);
        for group in groups {
            let [found, expected] =
                [&device as &dyn Policy, &host].map(|policy| by_name(export_all(policy, group).unwrap()));
            assert_eq!(found.len(), expected.len());
            for (tensor, expected) in expected {
                assert_eq!(found[&tensor].shape, expected.shape, "{name}: {tensor}");
                assert_close(&format!("{name}: {tensor}"), &found[&tensor].data, &expected.data, 1e-4);
            }
        }
    }
}
