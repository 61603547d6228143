//! Optimizers other than AdamW on one device and on meshes, compared with the host; states move between them bit for bit.

use crate::mesh_support::{on_mesh, sequences};
use crate::support::{assert_close, by_name, host_loss, import, runtime, state, whole};
use grpo_core::LossConfig;
use grpo_models::ModelConfig;
use grpo_policy::{OptimizerName, OptimizerSettings, Policy, Rule, StepLoss};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_testkit::margin::{assert_below, largest_difference};
use rstest::rstest;

/// Learning rate.
const RATE: f64 = 0.01;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        ..ModelConfig::default()
    }
}

/// Takes a step with one micro-batch: an even one in one program, an odd one in two.
fn train(policy: &mut dyn Policy, step: usize) {
    let (all, loss) = (sequences(), StepLoss::CrossEntropy { tokens: 5 });
    let report = if step.is_multiple_of(2) {
        policy.step(&[whole(&all)], loss, RATE).unwrap().1
    } else {
        policy.accumulate(&[whole(&all)], loss).unwrap();
        policy.apply(RATE).unwrap()
    };
    assert!(report.applied);
}

#[rstest]
#[case::one_device(&[])]
#[case::every_axis(&[("data", 2), ("fsdp", 2), ("tensor", 2)])]
fn optimizers_match_the_host(#[case] axes: &[(&str, usize)]) {
    let runtime = if axes.is_empty() { runtime().clone() } else { on_mesh(axes) };
    // Other tests compare AdamW and its 8-bit moments.
    for name in OptimizerName::ALL
        .into_iter()
        .filter(|name| Rule::of_optimizer(*name) != Rule::of_optimizer(OptimizerName::default()))
    {
        matches_the_host(&runtime, name);
    }
}

fn matches_the_host(runtime: &Runtime, name: OptimizerName) {
    let adamw = OptimizerSettings { name, weight_decay: 0.1, ..OptimizerSettings::default() };
    let mut host = CpuPolicy::new(&config(), 1, host_loss(LossConfig::default())).unwrap();
    let options = PjrtPolicyOptions::default();
    let mut device = PjrtPolicy::new(runtime, &config(), 1, LossConfig::default(), options).unwrap();
    device.import_weights(&state(&host)[0]).unwrap();
    host.reset_optimizer(&adamw).unwrap();
    device.reset_optimizer(&adamw).unwrap();
    for step in 0..4 {
        let before = state(&host)[0].clone();
        train(&mut host, step);
        train(&mut device, step);
        let [expected, _, of_host] = state(&host).map(by_name);
        let [found, _, moments] = state(&device).map(by_name);
        assert!(moments.keys().eq(of_host.keys()));
        let change = |tensors: &[f32], before: &[f32]| -> Vec<f64> {
            tensors.iter().zip(before).map(|(after, before)| f64::from(after - before)).collect()
        };
        for tensor in &before {
            let [found, expected] = [&found, &expected].map(|all| change(&all[&tensor.name].data, &tensor.data));
            let largest = expected.iter().fold(0.0, |largest: f64, change| largest.max(change.abs()));
            assert!(largest > 0.0, "{}", tensor.name);
            let what = format!("{name:?}, {} devices, step {step}: {}", runtime.devices().len(), tensor.name);
            assert_below(&what, largest_difference(&found, &expected) / largest, 2e-2);
        }
        for (name, expected) in &of_host {
            assert_close(&format!("step {step}: {name}"), &moments[name].data, &expected.data, 1e-3);
        }
        let saved = state(&host);
        import(&mut device, &saved[0], None, &saved[2], step as u64 + 1, &adamw);
        assert_eq!(state(&device).map(by_name), saved.map(by_name));
    }
}
