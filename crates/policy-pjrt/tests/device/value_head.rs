//! PPO's value head: its values, its loss and all gradients match the CPU policy and torch.

use crate::checkpoint::Checkpoint;
use crate::ppo_of_torch::Ppo;
use crate::support::{
    assert_close, assert_near, assert_same_losses, assert_same_metrics, assert_same_tensors, both, exported, gradients,
    host_gradients, import, moved, on_device, on_host, runtime, weights,
};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::ValueTargets;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig};
use grpo_models::LoraConfig;
use grpo_policy::{OptimizerSettings, Policy, Sequence, SequenceBatch, StepLoss, Weights, token_batch};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use rstest::rstest;

pub(crate) fn value_loss() -> ValueLossConfig {
    ValueLossConfig { vf_coef: 0.4, cliprange_value: Some(0.1) }
}

/// Returns the sequences as one micro-batch with all inputs of both losses; one return is missing.
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
    SequenceBatch { routed_experts: &[], sequences, tokens: tokens.with_weights(weights).unwrap() }
}

/// Splits a batch into micro-batches of `size` sequences; without weights, they are for scores.
pub(crate) fn parts<'a>(whole: &SequenceBatch<'a>, size: usize) -> Vec<SequenceBatch<'a>> {
    let parts = whole.sequences.chunks(size).enumerate().map(|(i, sequences)| {
        let rows = size * i..size * i + sequences.len();
        let tokens = match whole.tokens.weights() {
            Some(_) => whole.tokens.select_sequences(rows).unwrap(),
            None => whole.tokens.select_independent(rows).unwrap(),
        };
        SequenceBatch { routed_experts: &[], sequences, tokens }
    });
    parts.collect()
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen2", false)]
#[case("qwen3", true)]
#[ignore = "GRPO_TESTS=all"]
#[case("llama3", false)]
#[ignore = "GRPO_TESTS=all"]
#[case("llama3", true)]
fn values_and_both_losses_match_the_cpu_policy(#[case] name: &str, #[case] adapted: bool) {
    let checkpoint = Checkpoint::open(name);
    let mut host = on_host(&checkpoint).with_value_head(value_loss()).unwrap();
    let mut device = on_device(&checkpoint, PjrtPolicyOptions::default()).with_value_head(value_loss()).unwrap();
    if adapted {
        let lora = LoraConfig { r: 2, ..Default::default() };
        (host, device) = (host.with_lora(&lora, 3).unwrap(), device.with_lora(&lora, 3).unwrap());
    }
    assert!(device.has_value_head());
    assert_eq!(device.num_parameters(), host.num_parameters());
    assert_eq!(weights(&device), weights(&host), "{name}");
    // B is small: at this rank, adapters are scaled by 16, and large B would amplify rounding errors tenfold.
    let start = moved(&host, 0.02);
    let adamw = OptimizerSettings { adam_epsilon: 1e-3, ..OptimizerSettings::default() };
    both(&mut device, &mut host, |policy| import(policy, &start, None, &[], 0, &adamw));

    let sequences = checkpoint.completions();
    let parts = parts(&batch(&sequences), sequences.len().div_ceil(2));
    let [found, expected] = both(&mut device, &mut host, |policy| policy.values(&parts).unwrap());
    assert_close(&format!("{name}: values"), &found, &expected, 1e-5);
    let [found, expected] = both(&mut device, &mut host, |policy| policy.accumulate(&parts, StepLoss::Grpo).unwrap());
    assert_same_losses(name, &found, &expected);
    assert_same_metrics(name, &found, &expected);
    assert!(expected.value_loss > 0.01, "{name}");
    let found = gradients(&mut device);
    assert!(found.contains_key("value_head.weight") && found.contains_key("value_head.bias"));
    assert_same_tensors(name, &found, &host_gradients(&host), 1e-5);
    let [found, expected] = both(&mut device, &mut host, |policy| policy.apply(0.01).unwrap());
    assert!(found.applied, "{name}");
    assert_near(name, found.grad_norm, expected.grad_norm);
    assert_same_tensors(name, &weights(&device), &weights(&host), 3e-5);

    // Cross-entropy does not train the value head, and the value head is not exported with the model.
    let before = weights(&device);
    device.reset_optimizer(&OptimizerSettings { weight_decay: 0.0, ..adamw }).unwrap();
    device.accumulate(&parts, StepLoss::CrossEntropy { tokens: 50 }).unwrap();
    device.apply(0.01).unwrap();
    assert_eq!(weights(&device)["value_head.bias"], before["value_head.bias"]);
    assert_eq!(exported(&device).len(), checkpoint.config().parameters().len());
    device.freeze_ref_policy().unwrap();
    let of_both = [Weights::Policy, Weights::RefPolicy].map(|of| device.score(of, &parts).unwrap());
    assert_eq!(of_both[0].logp == of_both[1].logp, !adapted, "{name}");
}

#[test]
fn two_ppo_updates_match_torch() {
    let ppo = Ppo::open();
    let (config, weights, options) = (ppo.checkpoint.config(), &ppo.checkpoint.weights, PjrtPolicyOptions::default());
    let policy = PjrtPolicy::from_weights(runtime(), config, weights, ppo.loss(), options).unwrap();
    ppo.check(&mut policy.with_value_head(ppo.of_values()).unwrap());
}
