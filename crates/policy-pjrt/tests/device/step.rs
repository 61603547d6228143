//! A fused optimizer step gives the same results as a gradient followed by an update.

use crate::checkpoint::Checkpoint;
use crate::gradients::{by_name, on_device};
use crate::support::{assert_close, runtime};
use crate::value_head;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig};
use models::{LoraConfig, NamedTensor};
use policy::{
    AdamWConfig, Error, Policy, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, accumulate_and_apply,
    export_all, token_batch,
};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};

const RATE: f64 = 0.01;

/// Returns weights and moments.
fn state(policy: &PjrtPolicy) -> [Vec<NamedTensor>; 2] {
    [StateGroup::Weights(Weights::Policy), StateGroup::Optimizer].map(|group| export_all(policy, group).unwrap())
}

fn adamw() -> AdamWConfig {
    // AdamW divides differences of small gradients by epsilon.
    AdamWConfig { adam_epsilon: 1e-2, ..AdamWConfig::default() }
}

/// Returns all sequences as one micro-batch with advantages of both signs.
fn batch(sequences: &[Sequence]) -> SequenceBatch<'_> {
    let advantages = (0..sequences.len()).map(|i| [1.5, -0.5, 0.25][i % 3]).collect();
    let tokens = token_batch(sequences).unwrap().with_advantages(Advantages::PerSequence(advantages)).unwrap();
    SequenceBatch { sequences, tokens }
}

#[track_caller]
fn assert_same_state(what: &str, found: &PjrtPolicy, expected: &PjrtPolicy, tolerance: f32) {
    for (found, expected) in state(found).into_iter().zip(state(expected)) {
        let (found, expected) = (by_name(found), by_name(expected));
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
        for (name, expected) in expected.iter().filter(|(_, tensor)| tensor.data.iter().any(|x| *x != 0.0)) {
            assert_close(&format!("{what}: {name}"), &found[name].data, &expected.data, tolerance);
        }
    }
}

#[test]
fn a_fused_step_matches_gradient_and_update() {
    for (name, compute, with_adapters, with_values) in [
        ("qwen2", Compute::F32, false, false),
        ("qwen2", Compute::Bf16, false, false),
        ("qwen3", Compute::F32, true, true),
        ("llama3", Compute::F32, false, true),
        ("llama3", Compute::Bf16, true, false),
    ] {
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
            assert!((report.grad_norm - of_two.grad_norm).abs() <= 1e-5 * of_two.grad_norm && report.grad_norm > 0.0);
            assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss.abs().max(0.1), "{what}");
            assert!((found.value_loss > 0.0) == with_values && found.metrics.values().count() > 0);
            assert_close(&what, &found.scores.logp, &expected.scores.logp, 1e-5);
            assert_close(&what, &found.scores.entropy, &expected.scores.entropy, 1e-5);
            assert_same_state(&format!("{what}, step {step}"), &one, &two, 1e-5);
        }
        assert_eq!((one.optimizer_steps(), two.optimizer_steps()), (3, 3));
        assert_ne!(state(&one), before);
        // Roll back works after a fused step, too.
        one.roll_back().unwrap_err();
        let mut back = policy(true);
        back.step(std::slice::from_ref(&batch), StepLoss::Grpo, RATE).unwrap();
        let remembered = state(&back);
        back.begin().unwrap();
        back.step(std::slice::from_ref(&batch), StepLoss::Grpo, RATE).unwrap();
        assert_ne!(state(&back), remembered, "{what}");
        back.roll_back().unwrap();
        assert_eq!((state(&back), back.optimizer_steps()), (remembered, 1), "{what}");
    }
}

#[test]
fn a_step_of_several_micro_batches_accumulates_them() {
    let checkpoint = Checkpoint::open("qwen2");
    let sequences = checkpoint.completions();
    let imitate = StepLoss::CrossEntropy { tokens: sequences.iter().map(|s| s.completion.len()).sum() };
    let part = |sequences| SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() };
    let fresh = |adamw: &AdamWConfig| {
        let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
        policy.reset_optimizer(adamw).unwrap();
        policy
    };
    let mut whole = fresh(&adamw());
    whole.step(&[part(&sequences)], imitate, RATE).unwrap();
    let halves: Vec<SequenceBatch<'_>> = sequences.chunks(sequences.len().div_ceil(2)).map(part).collect();
    let mut parts = fresh(&adamw());
    parts.step(&halves, imitate, RATE).unwrap();
    assert_same_state("two micro-batches", &parts, &whole, 1e-5);
    // A gradient accumulated before is part of the step.
    let mut begun = fresh(&adamw());
    begun.accumulate(&halves[..1], imitate).unwrap();
    begun.step(&halves[1..], imitate, RATE).unwrap();
    assert_same_state("one after the other", &begun, &whole, 1e-5);
    // Without clipping, the checked program runs.
    let unclipped = AdamWConfig { max_grad_norm: 0.0, ..adamw() };
    let [mut one, mut two] = [(); 2].map(|()| fresh(&unclipped));
    one.step(&[part(&sequences)], imitate, RATE).unwrap();
    two.accumulate(&halves, imitate).unwrap();
    two.apply(RATE).unwrap();
    assert_same_state("unclipped", &one, &two, 1e-5);
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

    let skips = AdamWConfig { skip_grad_norm: Some(1e-3), ..AdamWConfig::default() };
    policy.reset_optimizer(&skips).unwrap();
    let weights = state(&policy).into_iter().next();
    for advantage in [1.0, 1e30, f32::MAX] {
        let (_, report) = policy.step(&with_advantage(advantage), StepLoss::Grpo, RATE).unwrap();
        assert!(!report.applied && (report.grad_norm > 1e-3 || report.grad_norm.is_nan()), "{report:?}");
    }
    let [after, moments] = state(&policy);
    assert!(Some(after) == weights && moments.is_empty(), "before the first step there are no moments");
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[0].clone() }];
    let error = policy.step(&[batch(&unknown)], StepLoss::Grpo, RATE).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(Some(state(&policy).into_iter().next()) == Some(weights), "nothing was given away");
}

#[test]
fn sequence_level_and_token_selecting_losses_have_a_fused_step() {
    let checkpoint = Checkpoint::open("llama3");
    let sequences = checkpoint.completions();
    for json in [
        r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06}"#,
        r#"{"loss_type": "dapo", "top_entropy_quantile": 0.5}"#,
    ] {
        let loss = LossConfig::from_json(json).unwrap();
        let fresh = || {
            let (config, weights) = (checkpoint.config(), &checkpoint.weights);
            let options = PjrtPolicyOptions::default();
            let mut policy = PjrtPolicy::from_weights(runtime(), config, weights, loss.clone(), options).unwrap();
            policy.reset_optimizer(&adamw()).unwrap();
            policy
        };
        let (mut one, mut two, part) = (fresh(), fresh(), [batch(&sequences)]);
        let (found, _) = one.step(&part, StepLoss::Grpo, RATE).unwrap();
        let (expected, _) = accumulate_and_apply(&mut two, &part, StepLoss::Grpo, RATE).unwrap();
        assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss.abs().max(0.1), "{json}");
        assert_same_state(json, &one, &two, 1e-5);
    }
}
