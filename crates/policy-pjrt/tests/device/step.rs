//! A fused optimizer step gives the same results as a gradient followed by an update.

use crate::checkpoint::Checkpoint;
use crate::support::{
    assert_near, assert_same_losses, assert_same_tensors, by_name, cross_entropy, halves, on_device, state, whole,
};
use crate::value_head;
use grpo_core::Advantages;
use grpo_core::objective::ValueLossConfig;
use grpo_models::LoraConfig;
use grpo_policy::{Error, OptimizerSettings, Policy, Sequence, SequenceBatch, StepLoss, accumulate_and_apply};
use grpo_policy_pjrt::decoder::Compute;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use rstest::rstest;

const RATE: f64 = 0.01;

fn adamw() -> OptimizerSettings {
    // AdamW divides differences of small gradients by epsilon.
    OptimizerSettings { adam_epsilon: 1e-2, ..OptimizerSettings::default() }
}

/// Returns all sequences as one micro-batch with advantages of both signs.
fn batch(sequences: &[Sequence]) -> SequenceBatch<'_> {
    let advantages = (0..sequences.len()).map(|i| [1.5, -0.5, 0.25][i % 3]).collect();
    let SequenceBatch { sequences, tokens, .. } = whole(sequences);
    SequenceBatch {
        routed_experts: &[],
        sequences,
        tokens: tokens.with_advantages(Advantages::PerSequence(advantages)).unwrap(),
    }
}

/// Compares all tensors that are not zero.
#[track_caller]
fn assert_same_state(what: &str, found: &PjrtPolicy, expected: &PjrtPolicy) {
    for group in state(found).into_iter().zip(state(expected)) {
        let [found, expected] = [group.0, group.1].map(|mut tensors| {
            tensors.retain(|tensor| tensor.data.iter().any(|x| *x != 0.0));
            by_name(tensors)
        });
        assert_same_tensors(what, &found, &expected, 1e-5);
    }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen2", Compute::F32, false, false)]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen2", Compute::Bf16, false, false)]
#[case("qwen3", Compute::F32, true, true)]
#[ignore = "GRPO_TESTS=all"]
#[case("llama3", Compute::F32, false, true)]
#[ignore = "GRPO_TESTS=all"]
#[case("llama3", Compute::Bf16, true, false)]
fn a_fused_step_matches_gradient_and_update(
    #[case] name: &str,
    #[case] compute: Compute,
    #[case] with_adapters: bool,
    #[case] with_values: bool,
) {
    let checkpoint = Checkpoint::open(name);
    let what = format!("{name} {compute:?}, adapters: {with_adapters}, values: {with_values}");
    let policy = |can_roll_back| {
        let options = PjrtPolicyOptions { compute, can_roll_back, ..PjrtPolicyOptions::default() };
        let mut policy = on_device(&checkpoint, options);
        if with_adapters {
            policy = policy.with_lora(&LoraConfig { r: 2, ..LoraConfig::default() }, 3).unwrap();
        }
        if with_values {
            policy = policy.with_value_head(ValueLossConfig::default()).unwrap();
        }
        policy.reset_optimizer(&adamw()).unwrap();
        policy
    };
    let sequences = checkpoint.completions();
    let batch = match with_values {
        true => value_head::batch(&sequences),
        false => batch(&sequences),
    };
    let [mut one, mut two] = [false, true].map(policy);
    let before = state(&one);
    for step in 1..=3 {
        if step == 2 {
            // With a saved state, the step must not update in place.
            two.begin().unwrap();
        }
        let part = std::slice::from_ref(&batch);
        let (found, report) = one.step(part, StepLoss::Grpo, RATE).unwrap();
        let (expected, of_two) = accumulate_and_apply(&mut two, part, StepLoss::Grpo, RATE).unwrap();
        assert!(report.applied && of_two.applied, "{what}, step {step}");
        assert_near(&what, report.grad_norm, of_two.grad_norm);
        assert_same_losses(&what, &found, &expected);
        assert!((found.value_loss > 0.0) == with_values && found.metrics.values().count() > 0);
        assert_same_state(&format!("{what}, step {step}"), &one, &two);
    }
    assert_eq!((one.optimizer_steps(), two.optimizer_steps()), (3, 3));
    assert_ne!(state(&one), before);
    one.roll_back().unwrap_err();
}

#[test]
fn a_step_of_several_micro_batches_accumulates_them() {
    let checkpoint = Checkpoint::open("qwen2");
    let sequences = checkpoint.completions();
    let (all, halves, loss) = ([whole(&sequences)], halves(&sequences), cross_entropy(&sequences));
    // Without clipping, the checked program runs.
    for adamw in [adamw(), OptimizerSettings { max_grad_norm: 0.0, ..adamw() }] {
        let [mut one, mut two, mut begun] = [(); 3].map(|()| on_device(&checkpoint, PjrtPolicyOptions::default()));
        for policy in [&mut one, &mut two, &mut begun] {
            policy.reset_optimizer(&adamw).unwrap();
        }
        one.step(&all, loss, RATE).unwrap();
        two.step(&halves, loss, RATE).unwrap();
        assert_same_state("two micro-batches", &two, &one);
        // A gradient accumulated before is part of the step.
        begun.accumulate(&halves[..1], loss).unwrap();
        begun.step(&halves[1..], loss, RATE).unwrap();
        assert_same_state("one after the other", &begun, &one);
    }
}

#[test]
fn a_rejected_step_changes_nothing() {
    let checkpoint = Checkpoint::open("qwen2");
    let sequences = checkpoint.completions();
    let with_advantage = |advantage: f32| {
        let mut batch = batch(&sequences);
        let advantages = Advantages::PerSequence(vec![advantage; sequences.len()]);
        batch.tokens = batch.tokens.with_advantages(advantages).unwrap();
        [batch]
    };
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions { can_roll_back: false, ..Default::default() });
    policy.step(&with_advantage(1.0), StepLoss::Grpo, RATE).unwrap();
    let before = state(&policy);
    let unchanged = |policy: &PjrtPolicy| assert!((state(policy), policy.optimizer_steps()) == (before.clone(), 1));
    // The loss is finite, but its gradient norm overflows f32.
    let error = policy.step(&with_advantage(1e30), StepLoss::Grpo, RATE).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { what, step: 1 } if what == "the gradient"), "{error}");
    unchanged(&policy);
    // If the loss is not finite, the caller sees it in the output.
    let (output, report) = policy.step(&with_advantage(f32::MAX), StepLoss::Grpo, RATE).unwrap();
    assert!(!output.loss.is_finite() && !report.applied, "{} {report:?}", output.loss);
    unchanged(&policy);
    // The rejected steps had no effect on later ones.
    let mut other = on_device(&checkpoint, PjrtPolicyOptions::default());
    for policy in [&mut policy, &mut other] {
        policy.step(&with_advantage(1.0), StepLoss::Grpo, RATE).unwrap();
    }
    other.step(&with_advantage(1.0), StepLoss::Grpo, RATE).unwrap();
    assert!(state(&policy) == state(&other));

    let skips = OptimizerSettings { skip_grad_norm: Some(1e-3), ..OptimizerSettings::default() };
    policy.reset_optimizer(&skips).unwrap();
    let [weights, ..] = state(&policy);
    for advantage in [1.0, 1e30, f32::MAX] {
        let (_, report) = policy.step(&with_advantage(advantage), StepLoss::Grpo, RATE).unwrap();
        assert!(!report.applied && (report.grad_norm > 1e-3 || report.grad_norm.is_nan()), "{report:?}");
    }
    let [after, _, moments] = state(&policy);
    assert!(after == weights && moments.is_empty(), "before the first step there are no moments");
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[0].clone() }];
    let error = policy.step(&[batch(&unknown)], StepLoss::Grpo, RATE).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(state(&policy)[0] == weights, "nothing was given away");
}
