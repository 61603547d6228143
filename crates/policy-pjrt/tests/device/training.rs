//! The [`Policy`] contract on a device, against the CPU policy.

use crate::support::{assert_close, runtime};
use grpo_core::{Advantages, Implementation, LossConfig};
use models::{ModelConfig, NamedTensor};
use policy::{
    AdamWConfig, Error, Policy, PolicyState, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all,
    token_batch,
};
use policy_cpu::{CpuPolicy, PolicyLoss};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use std::sync::Arc;

fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 2,
        initializer_range: 0.3,
        ..Default::default()
    }
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
    let mut weights = Vec::new();
    on_host(loss).export_model(&mut weights).unwrap();
    PjrtPolicy::from_tensors(runtime(), &config(), &weights, loss.clone(), options).unwrap()
}

fn fresh() -> PjrtPolicy {
    on_device(&grpo(), PjrtPolicyOptions::default())
}

fn sequences() -> [Sequence; 2] {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    [of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

/// Returns the sequences in micro-batches of `size`, with all inputs of a loss and ratios on both sides of the clip range.
fn batches<'a>(policy: &mut dyn Policy, sequences: &'a [Sequence], size: usize) -> Vec<SequenceBatch<'a>> {
    let plain = |sequences| SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() };
    policy.freeze_ref_policy().unwrap();
    let now = policy.score(Weights::RefPolicy, &[plain(sequences)]).unwrap().logp;
    let shifted = |by: [f32; 5]| now.iter().zip(by).map(|(logp, by)| logp + by).collect::<Vec<_>>();
    let (old, of_ref) = (shifted([-0.5, 0.05, -0.5, 0.5, -0.05]), shifted([0.3, -0.2, 0.1, -0.4, 0.0]));
    let mut first = 0;
    let parts = sequences.chunks(size).zip([1.5, -0.5].chunks(size)).map(|(sequences, advantages)| {
        let mut part = plain(sequences);
        let tokens = first..first + part.tokens.tokens();
        first = tokens.end;
        let batch = part.tokens.with_advantages(Advantages::PerSequence(advantages.to_vec())).unwrap();
        let batch = batch.with_old_logp(old[tokens.clone()].to_vec()).unwrap();
        part.tokens = batch.with_ref_logp(of_ref[tokens].to_vec()).unwrap();
        part
    });
    parts.collect()
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

fn all(policy: &PjrtPolicy) -> [Vec<NamedTensor>; 3] {
    let of = StateGroup::Weights;
    [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer].map(|group| export_all(policy, group).unwrap())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
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
fn scores_equal_those_of_the_loss_bit_for_bit() {
    let (mut policy, sequences) = (fresh(), sequences());
    let mut parts = batches(&mut policy, &sequences, 1);
    let scores = policy.score(Weights::Policy, &parts).unwrap();
    assert_eq!(scores.logp.len(), 5);
    let mut first = 0;
    for part in &mut parts {
        let old = scores.logp[first..first + part.tokens.tokens()].to_vec();
        first += old.len();
        part.tokens = part.tokens.clone().with_old_logp(old).unwrap();
    }
    let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    assert_eq!(bits(&output.scores.logp), bits(&scores.logp), "the ratio is exactly 1 on policy");
    assert_eq!(output.metrics.value("clip_ratio/region_mean"), Some(0.0));
    // The reference policy has equal weights, but they are not updated.
    policy.apply(0.1).unwrap();
    assert_ne!(bits(&policy.score(Weights::Policy, &parts).unwrap().logp), bits(&scores.logp));
    assert_eq!(bits(&policy.score(Weights::RefPolicy, &parts).unwrap().logp), bits(&scores.logp));
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
    // An update consumes the gradient; the next update needs a new one.
    assert!(parts.apply(0.1).unwrap().applied);
    assert!(gradients(&mut parts).is_empty());
    assert!(matches!(parts.apply(0.1), Err(Error::Argument { operation: "apply", .. })));
    assert!(whole.skip().unwrap().grad_norm > 0.0);
    assert_eq!(whole.skip().unwrap().grad_norm, 0.0, "the gradient was dropped before");
}

#[test]
fn a_failed_accumulation_leaves_no_gradient() {
    let (mut policy, sequences) = (fresh(), sequences());
    let mut parts = batches(&mut policy, &sequences, 1);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[1].clone() }];
    parts[1].sequences = &unknown;
    let error = policy.accumulate(&parts, StepLoss::Grpo).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(policy.apply(0.1).is_err(), "there is nothing to apply");
    let mut one = batches(&mut policy, &sequences, 1).swap_remove(0);
    one.sequences = &sequences[1..];
    let error = policy.accumulate(&[one], StepLoss::Grpo).unwrap_err();
    assert!(matches!(error, Error::Argument { operation: "a micro-batch", .. }), "{error}");
}

#[test]
fn an_update_that_is_not_finite_changes_nothing() {
    let (mut policy, sequences) = (on_device(&LossConfig::default(), PjrtPolicyOptions::default()), sequences());
    let part = || [SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() }];
    let imitate = StepLoss::CrossEntropy { tokens: 5 };
    policy.accumulate(&part(), imitate).unwrap();
    policy.apply(0.01).unwrap();
    let before = all(&policy);
    // The update would make weights infinite.
    policy.accumulate(&part(), imitate).unwrap();
    let error = policy.apply(1e38).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { what, step: 2 } if what.contains("weights")), "{error}");
    assert_eq!((all(&policy), policy.optimizer_steps()), (before.clone(), 1));
    // The squared gradient overflows f32.
    let advantages = Advantages::PerSequence(vec![1e30, -1e30]);
    let large = || {
        let [mut part] = part();
        part.tokens = part.tokens.with_advantages(advantages.clone()).unwrap();
        [part]
    };
    policy.accumulate(&large(), StepLoss::Grpo).unwrap();
    let error = policy.apply(0.01).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { what, step: 1 } if what == "the gradient"), "{error}");
    assert_eq!((all(&policy), policy.optimizer_steps()), (before.clone(), 1));
    // With a limit, updates above it are skipped.
    let adamw = AdamWConfig { skip_grad_norm: Some(1e-3), ..AdamWConfig::default() };
    policy.reset_optimizer(&adamw).unwrap();
    for batch in [large(), part()] {
        let loss = if batch[0].tokens.has_advantages() { StepLoss::Grpo } else { imitate };
        policy.accumulate(&batch, loss).unwrap();
        let report = policy.apply(0.01).unwrap();
        assert!(!report.applied && report.grad_norm > 1e-3);
    }
    assert_eq!((&all(&policy)[0], policy.optimizer_steps()), (&before[0], 0));
    assert!(all(&policy)[2].is_empty(), "before the first step there are no moments");
}

#[test]
fn states_are_restored_bit_for_bit_by_import_and_roll_back() {
    for can_roll_back in [true, false] {
        let options = || PjrtPolicyOptions { can_roll_back, ..PjrtPolicyOptions::default() };
        let (mut policy, sequences) = (on_device(&grpo(), options()), sequences());
        let parts = batches(&mut policy, &sequences, 1);
        let step = |policy: &mut PjrtPolicy| {
            policy.accumulate(&parts, StepLoss::Grpo).unwrap();
            policy.apply(0.01).unwrap();
            policy.mix_ref_policy(0.5).unwrap();
        };
        step(&mut policy);
        let before = all(&policy);
        policy.begin().unwrap();
        step(&mut policy);
        policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        assert_ne!(all(&policy), before);
        let back = policy.roll_back();
        if !can_roll_back {
            assert!(matches!(back, Err(Error::State { .. })));
            continue;
        }
        back.unwrap();
        assert_eq!(all(&policy), before);
        assert_eq!((policy.optimizer_steps(), policy.skip().unwrap().grad_norm), (1, 0.0));
        assert!(matches!(policy.roll_back(), Err(Error::State { .. })), "nothing to go back to");

        // After an import of the tensors in another order, the next step is the same.
        let mut other = fresh();
        let [mut weights, mut ref_weights, mut moments] = before.clone();
        for tensors in [&mut weights, &mut ref_weights, &mut moments] {
            tensors.reverse();
        }
        let adamw = AdamWConfig::default();
        let state = PolicyState {
            policy: &weights,
            ref_policy: Some(&ref_weights),
            optimizer: &moments,
            optimizer_steps: 1,
            adamw: &adamw,
        };
        let short = PolicyState { optimizer: &&moments[1..], ..state };
        let untouched = all(&other);
        assert!(matches!(other.import(&short), Err(Error::State { .. })));
        assert_eq!(all(&other), untouched, "a failed import changed the state");
        other.import(&state).unwrap();
        assert_eq!(all(&other), before);
        step(&mut policy);
        step(&mut other);
        assert_eq!(all(&other), all(&policy));
    }
}

#[test]
fn a_missing_reference_policy_or_value_head_is_an_error() {
    let (mut policy, sequences) = (fresh(), sequences());
    let part = SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() };
    assert!(!policy.has_ref_policy());
    for error in [
        policy.score(Weights::RefPolicy, std::slice::from_ref(&part)).unwrap_err(),
        policy.mix_ref_policy(0.5).unwrap_err(),
    ] {
        assert!(error.to_string().contains("freeze_ref_policy"), "{error}");
    }
    assert!(matches!(policy.values(&[part]), Err(Error::NoValueHead)));
    let weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    assert_eq!(policy.num_parameters(), weights.iter().map(|tensor| tensor.data.len()).sum::<usize>());
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
