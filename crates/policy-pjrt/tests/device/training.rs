//! The contract of [`Policy`] on a device, and its numbers against the CPU policy.

use crate::support::{assert_close, runtime};
use grpo_core::{Implementation, LossConfig};
use models::{ModelConfig, NamedTensor};
use policy::contract::{Fixture, Setup, batches, sequences};
use policy::{Error, Policy, SequenceBatch, StepLoss, Weights, token_batch};
use policy_cpu::{CpuPolicy, PolicyLoss};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use std::sync::Arc;

struct OnDevice;

impl Fixture for OnDevice {
    // Scores equal those of the loss bit for bit: the ratio is exactly 1 on policy.
    const SCORE_TOLERANCE: f32 = 0.0;

    fn policy(Setup { config, loss, lora, of_values }: &Setup) -> policy::Result<Box<dyn Policy>> {
        let mut policy = PjrtPolicy::new(runtime(), config, 1, loss.clone(), PjrtPolicyOptions::default())?;
        if let Some(lora) = lora {
            policy = policy.with_lora(lora, 1)?;
        }
        Ok(match of_values {
            Some(of_values) => Box::new(policy.with_value_head(of_values.clone())?),
            None => Box::new(policy),
        })
    }
}

policy::contract_tests!(OnDevice);

fn config() -> ModelConfig {
    Setup::default().config
}

fn grpo() -> LossConfig {
    LossConfig { beta: 0.1, ..LossConfig::default() }
}

fn loss(json: &str) -> LossConfig {
    LossConfig::from_json(json).unwrap()
}

fn on_host(loss: &LossConfig) -> CpuPolicy {
    let loss = PolicyLoss {
        config: loss.clone().into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 16,
    };
    CpuPolicy::new(&config(), 1, loss).unwrap()
}

/// Creates the same policy on the device.
fn on_device(loss: &LossConfig, options: PjrtPolicyOptions) -> PjrtPolicy {
    PjrtPolicy::new(runtime(), &config(), 1, loss.clone(), options).unwrap()
}

fn fresh() -> PjrtPolicy {
    on_device(&grpo(), PjrtPolicyOptions::default())
}

fn gradients(policy: &mut PjrtPolicy) -> Vec<NamedTensor> {
    let mut gradients = Vec::new();
    policy.export_gradients(&mut gradients).unwrap();
    gradients
}

fn of_host(policy: &CpuPolicy) -> Vec<NamedTensor> {
    let mut gradients = Vec::new();
    policy.model().export_values(policy.gradients().parameters(), &mut gradients).unwrap();
    gradients
}

#[track_caller]
fn assert_same_gradients(what: &str, found: &[NamedTensor], expected: &[NamedTensor], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for found in found {
        let expected = expected.iter().find(|tensor| tensor.name == found.name).unwrap();
        assert_eq!(found.shape, expected.shape, "{what}: {}", found.name);
        assert_close(&format!("{what}: {}", found.name), &found.data, &expected.data, tolerance);
    }
}

#[test]
fn token_and_sequence_level_losses_match_the_cpu_policy() {
    let sequences = sequences();
    for (name, config) in [
        (
            "grpo",
            loss(
                r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "entropy_coef": 0.02, "temperature": 0.9}"#,
            ),
        ),
        ("gspo", loss(r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1}"#)),
        ("top entropy", loss(r#"{"loss_type": "dapo", "top_entropy_quantile": 0.5}"#)),
    ] {
        let (mut host, mut device) = (on_host(&config), on_device(&config, PjrtPolicyOptions::default()));
        let parts = batches(&mut host, &sequences, 2);
        let expected = host.accumulate(&parts, StepLoss::Grpo).unwrap();
        let found = device.accumulate(&parts, StepLoss::Grpo).unwrap();
        assert!(
            (found.loss - expected.loss).abs() <= 1e-5 * expected.loss.abs().max(0.1),
            "{name}: {found:?} {expected:?}"
        );
        for (found, expected) in
            [(&found.scores.logp, &expected.scores.logp), (&found.scores.entropy, &expected.scores.entropy)]
        {
            assert_close(name, found, expected, 1e-5);
        }
        for (key, expected) in expected.metrics.values() {
            let found = found.metrics.value(key).unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected.abs().max(0.01), "{name}, {key}: {found} {expected}");
        }
        assert_same_gradients(name, &gradients(&mut device), &of_host(&host), 2e-5);
        // The following update matches, too.
        let [expected, found] = [host.apply(0.01).unwrap(), device.apply(0.01).unwrap()];
        assert!((found.grad_norm - expected.grad_norm).abs() <= 1e-5 * expected.grad_norm && found.applied);
        let scores = |policy: &mut dyn Policy| policy.score(Weights::Policy, &parts).unwrap().logp;
        assert_close(name, &scores(&mut device), &scores(&mut host), 1e-4);
    }
}

#[test]
fn micro_batches_add_up_to_the_whole_batch() {
    let sequences = sequences();
    let tokens = 5;
    let mut whole = fresh();
    let one = [SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() }];
    let all = whole.accumulate(&one, StepLoss::CrossEntropy { tokens }).unwrap();
    let mut parts = fresh();
    let mut loss = 0.0;
    for sequences in sequences.chunks(1) {
        let part = SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() };
        loss += parts.accumulate(&[part], StepLoss::CrossEntropy { tokens }).unwrap().loss;
    }
    assert!((loss - all.loss).abs() < 1e-5 * all.loss, "{loss} {}", all.loss);
    assert_same_gradients("parts", &gradients(&mut parts), &gradients(&mut whole), 1e-5);
}

#[test]
fn a_micro_batch_with_another_number_of_tokens_is_an_error() {
    let (mut policy, sequences) = (fresh(), sequences());
    let mut one = batches(&mut policy, &sequences, 1).swap_remove(0);
    one.sequences = &sequences[1..];
    let error = policy.accumulate(&[one], StepLoss::Grpo).unwrap_err();
    assert!(matches!(error, Error::Argument { operation: "a micro-batch", .. }), "{error}");
}

#[test]
fn a_gradient_whose_square_overflows_is_an_error() {
    let (mut policy, sequences) = (on_device(&LossConfig::default(), PjrtPolicyOptions::default()), sequences());
    let tokens = token_batch(&sequences).unwrap().with_advantages(vec![1e30, -1e30]).unwrap();
    policy.accumulate(&[SequenceBatch { sequences: &sequences, tokens }], StepLoss::Grpo).unwrap();
    let error = policy.apply(0.01).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { what, step: 0 } if what == "the gradient"), "{error}");
}

#[test]
fn a_policy_without_roll_back_saves_no_state() {
    let mut policy = on_device(&grpo(), PjrtPolicyOptions { can_roll_back: false, ..Default::default() });
    policy.begin().unwrap();
    assert!(matches!(policy.roll_back(), Err(Error::State { .. })));
}

#[test]
fn bf16_products_have_nearly_the_same_gradients() {
    let sequences = sequences();
    let mut exact = fresh();
    let mut rounded = on_device(&grpo(), PjrtPolicyOptions { compute: Compute::Bf16, ..Default::default() });
    let part = [SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() }];
    let imitate = StepLoss::CrossEntropy { tokens: 5 };
    let [of_exact, of_rounded] =
        [&mut exact, &mut rounded].map(|policy| policy.accumulate(&part, imitate).unwrap().loss);
    assert!(of_exact != of_rounded && (of_exact - of_rounded).abs() < 0.02 * of_exact, "{of_exact} {of_rounded}");
    let (exact, rounded) = (gradients(&mut exact), gradients(&mut rounded));
    for (exact, rounded) in exact.iter().zip(&rounded) {
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let size = norm(&mut exact.data.iter().copied());
        let off = norm(&mut exact.data.iter().zip(&rounded.data).map(|(a, b)| a - b));
        assert!(off < 0.1 * size, "{}: off by {off} of {size}", exact.name);
    }
}
