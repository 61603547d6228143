//! PPO's value head: its values, its loss and all gradients match the CPU policy and torch.

use crate::checkpoint::Checkpoint;
use crate::gradients::{by_name, gradients, host_gradients, policy_loss};
use crate::ppo_of_torch::Ppo;
use crate::support::{assert_close, runtime};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::ValueTargets;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig};
use models::{LoraConfig, NamedTensor};
use policy::{
    AdamWConfig, Policy, PolicyState, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all, token_batch,
};
use policy_cpu::CpuPolicy;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};

fn host(checkpoint: &Checkpoint) -> CpuPolicy {
    CpuPolicy::from_weights(checkpoint.config(), &checkpoint.weights, policy_loss()).unwrap()
}

fn device(checkpoint: &Checkpoint, loss: LossConfig) -> PjrtPolicy {
    let options = PjrtPolicyOptions::default();
    PjrtPolicy::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, loss, options).unwrap()
}

fn weights(policy: &dyn Policy) -> Vec<NamedTensor> {
    export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap()
}

/// Returns two micro-batches with all inputs of both losses; one return is missing.
fn batches(sequences: &[Sequence]) -> Vec<SequenceBatch<'_>> {
    let SequenceBatch { tokens, .. } = batch(sequences);
    let (whole, half) = (sequences.len(), sequences.len().div_ceil(2));
    let part = |rows: std::ops::Range<usize>| SequenceBatch {
        sequences: &sequences[rows.clone()],
        tokens: tokens.select_sequences(rows).unwrap(),
    };
    vec![part(0..half), part(half..whole)]
}

/// Returns the same as one micro-batch.
pub(crate) fn batch(sequences: &[Sequence]) -> SequenceBatch<'_> {
    let tokens = token_batch(sequences).unwrap();
    let n = tokens.tokens();
    let number = |scale: f32, shift: f32| (0..n).map(|t| scale * (t as f32 + shift).cos()).collect::<Vec<_>>();
    let mut returns = number(1.0, 0.0);
    returns[1] = f32::NAN;
    let targets = ValueTargets { old_values: number(0.2, 1.0), returns };
    let tokens = tokens.with_value_targets(targets).unwrap();
    let tokens = tokens.with_advantages(Advantages::PerToken(number(1.0, 2.0))).unwrap();
    let weights = token_weights(&LossConfig::default(), &tokens).unwrap();
    SequenceBatch { sequences, tokens: tokens.with_weights(weights).unwrap() }
}

#[test]
fn values_and_both_losses_of_every_family_match_the_cpu_policy() {
    for (name, adapted) in [("qwen2", false), ("qwen3", true), ("llama3", false), ("llama3", true)] {
        let checkpoint = Checkpoint::open(name);
        let of_values = || ValueLossConfig { vf_coef: 0.4, cliprange_value: Some(0.1) };
        let mut host = host(&checkpoint).with_value_head(of_values()).unwrap();
        let mut device = device(&checkpoint, LossConfig::default()).with_value_head(of_values()).unwrap();
        if adapted {
            let lora = LoraConfig { r: 2, ..Default::default() };
            (host, device) = (host.with_lora(&lora, 3).unwrap(), device.with_lora(&lora, 3).unwrap());
        }
        assert!(device.has_value_head());
        assert_eq!(device.num_parameters(), host.num_parameters());
        // Use nonzero weights, because value heads and B of adapters are initialised to zero. B is small: at this rank, adapters are scaled
        // by 16, and large B would amplify rounding errors tenfold.
        let mut start = weights(&host);
        assert_eq!(by_name(weights(&device)), by_name(start.clone()), "{name}");
        for (i, tensor) in start.iter_mut().enumerate() {
            if tensor.name.starts_with("value_head.") || tensor.name.contains(".lora_B.") {
                let values = tensor.data.iter_mut().enumerate();
                let scale = if tensor.name.contains(".lora_B.") { 0.02 } else { 0.2 };
                values.for_each(|(k, value)| *value = scale * ((i + 2 * k) as f32).sin());
            }
        }
        let adamw = AdamWConfig { adam_epsilon: 1e-3, ..AdamWConfig::default() };
        let state = PolicyState { policy: &start, ref_policy: None, optimizer: &[], optimizer_steps: 0, adamw: &adamw };
        host.import(&state).unwrap();
        device.import(&state).unwrap();

        let sequences = checkpoint.completions();
        let parts = batches(&sequences);
        let [expected, found] =
            [&mut host as &mut dyn Policy, &mut device].map(|policy| policy.values(&parts).unwrap());
        assert_close(&format!("{name}: values"), &found, &expected, 1e-5);

        let [expected, found] = [&mut host as &mut dyn Policy, &mut device]
            .map(|policy| policy.accumulate(&parts, StepLoss::Grpo).unwrap());
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(0.1);
        assert!(near(found.loss, expected.loss) && near(found.value_loss, expected.value_loss), "{name}");
        assert!(near(found.policy_loss, expected.policy_loss) && expected.value_loss > 0.01, "{name}");
        for (key, expected) in expected.metrics.values() {
            let found = found.metrics.value(key).unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected.abs().max(0.01), "{name}, {key}: {found} {expected}");
        }
        let (found, expected) = (gradients(&mut device), host_gradients(&host));
        assert_eq!(found.len(), expected.len(), "{name}");
        assert!(found.contains_key("value_head.weight") && found.contains_key("value_head.bias"));
        for (parameter, expected) in expected {
            assert_eq!(found[&parameter].shape, expected.shape, "{name}: {parameter}");
            assert_close(&format!("{name}: {parameter}"), &found[&parameter].data, &expected.data, 1e-5);
        }
        let [expected, found] = [&mut host as &mut dyn Policy, &mut device].map(|policy| policy.apply(0.01).unwrap());
        assert!(near(found.grad_norm, expected.grad_norm) && found.applied, "{name}");
        let (found, expected) = (by_name(weights(&device)), by_name(weights(&host)));
        for (parameter, expected) in expected {
            assert_close(&format!("{name}: {parameter}"), &found[&parameter].data, &expected.data, 3e-5);
        }

        // Cross-entropy does not train the value head, and the value head is not exported with the model.
        let before = weights(&device).into_iter().find(|tensor| tensor.name == "value_head.bias").unwrap();
        let adamw = AdamWConfig { weight_decay: 0.0, ..adamw };
        device.reset_optimizer(&adamw).unwrap();
        device.accumulate(&parts, StepLoss::CrossEntropy { tokens: 50 }).unwrap();
        device.apply(0.01).unwrap();
        assert_eq!(weights(&device).into_iter().find(|tensor| tensor.name == "value_head.bias").unwrap(), before);
        let mut model = Vec::new();
        device.export_model(&mut model).unwrap();
        assert_eq!(model.len(), checkpoint.config().parameters().len());
        device.freeze_ref_policy().unwrap();
        let of_both = [Weights::Policy, Weights::RefPolicy].map(|of| device.score(of, &parts).unwrap());
        assert_eq!(of_both[0].logp == of_both[1].logp, !adapted, "{name}");
    }
}

#[test]
fn two_ppo_updates_match_torch() {
    let ppo = Ppo::open();
    let mut policy = device(&ppo.checkpoint, ppo.loss()).with_value_head(ppo.of_values()).unwrap();
    ppo.check(&mut policy);
}
