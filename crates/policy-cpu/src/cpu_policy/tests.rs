//! The [`Policy`] contract, tested on [`CpuPolicy`].

use super::*;
use burn::tensor::{Tensor, TensorData};
use grpo_core::batch::{TokenWeights, ValueTargets};
use grpo_core::{Advantages, Implementation, LossConfig};
use models::NamedTensor;
use policy::{Sequence, export_all, token_batch};
use std::sync::Arc;

fn fresh_policy() -> CpuPolicy {
    let config = ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() };
    let loss = PolicyLoss {
        config: LossConfig { beta: 0.1, ..LossConfig::default() }.into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 8,
    };
    CpuPolicy::new(&config, 1, loss).unwrap()
}

fn sequences() -> [Sequence; 2] {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    [of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

/// Returns two micro-batches with one sequence each and all inputs of the loss.
fn batches<'a>(policy: &mut CpuPolicy, sequences: &'a [Sequence]) -> Vec<SequenceBatch<'a>> {
    let mut parts: Vec<_> = (sequences.chunks(1))
        .map(|sequences| SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() })
        .collect();
    policy.freeze_ref_policy().unwrap();
    for (part, advantage) in parts.iter_mut().zip([1.5, -0.5]) {
        let ref_logp = policy.score(Weights::RefPolicy, std::slice::from_ref(part)).unwrap().logp;
        let tokens = part.tokens.clone().with_advantages(Advantages::PerSequence(vec![advantage])).unwrap();
        part.tokens = tokens.with_ref_logp(ref_logp.iter().map(|logp| logp - 0.1).collect::<Vec<_>>()).unwrap();
    }
    parts
}

fn weights(policy: &CpuPolicy) -> Vec<NamedTensor> {
    export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn scores_match_the_loss_and_use_the_requested_weights() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let mut parts = batches(&mut policy, &sequences);
    let scores = policy.score(Weights::Policy, &parts).unwrap();
    assert_eq!(scores.logp.len(), 5);
    let mut first = 0;
    for part in &mut parts {
        let old = scores.logp[first..first + part.tokens.tokens()].to_vec();
        first += old.len();
        part.tokens = part.tokens.clone().with_old_logp(old).unwrap();
    }
    let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The forward pass may round differently with gradients; the loss itself does not.
    assert!(output.scores.logp.iter().zip(&scores.logp).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_eq!(output.metrics.value("clip_ratio/region_mean"), Some(0.0));
    // The reference policy has equal weights, but they are not updated.
    policy.apply(0.1).unwrap();
    assert_ne!(bits(&policy.score(Weights::Policy, &parts).unwrap().logp), bits(&scores.logp));
    assert_eq!(bits(&policy.score(Weights::RefPolicy, &parts).unwrap().logp), bits(&scores.logp));
}

#[test]
fn a_failed_accumulation_leaves_no_gradient() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let mut parts = batches(&mut policy, &sequences);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The second micro-batch has a token outside the vocabulary.
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[1].clone() }];
    parts[1].sequences = &unknown;
    let error = policy.accumulate(&parts, StepLoss::Grpo).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(policy.apply(0.1).is_err(), "there is nothing to apply");
}

#[test]
fn gradients_accumulate_until_an_update() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let parts = batches(&mut policy, &sequences);
    let norm = |policy: &mut CpuPolicy| policy.skip().unwrap().grad_norm;
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let whole = norm(&mut policy);
    assert!(whole > 0.0);
    assert_eq!(norm(&mut policy), 0.0, "the gradient was dropped before");
    // One call with both micro-batches equals one call for each.
    parts.chunks(1).for_each(|part| drop(policy.accumulate(part, StepLoss::Grpo).unwrap()));
    assert_eq!(norm(&mut policy).to_bits(), whole.to_bits());
    assert!(matches!(policy.apply(0.1), Err(Error::Argument { operation: "apply", .. })));
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let report = policy.apply(0.1).unwrap();
    assert!(report.applied && report.grad_norm == whole && policy.optimizer_steps() == 1);
    assert_eq!(norm(&mut policy), 0.0);
}

#[test]
fn a_supervised_step_lowers_its_loss() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let parts = batches(&mut policy, &sequences);
    let step = |policy: &mut CpuPolicy| policy.accumulate(&parts, StepLoss::CrossEntropy { tokens: 5 }).unwrap().loss;
    let before = step(&mut policy);
    policy.apply(0.01).unwrap();
    assert!(step(&mut policy) < before - 0.01);
}

#[test]
fn states_are_restored_bit_for_bit_by_import_and_roll_back() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let parts = batches(&mut policy, &sequences);
    let step = |policy: &mut CpuPolicy| {
        policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        policy.apply(0.01).unwrap();
        policy.mix_ref_policy(0.5).unwrap();
    };
    let of = StateGroup::Weights;
    let groups = [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer];
    let all = |policy: &CpuPolicy| groups.map(|group| export_all(policy, group).unwrap());
    step(&mut policy);
    let before = all(&policy);
    policy.begin().unwrap();
    step(&mut policy);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    assert_ne!(all(&policy), before);
    policy.roll_back().unwrap();
    assert_eq!(all(&policy), before);
    assert_eq!((policy.optimizer_steps(), policy.skip().unwrap().grad_norm), (1, 0.0));
    assert!(matches!(policy.roll_back(), Err(Error::State { .. })), "nothing to go back to");

    // After an import of the tensors in another order, the next step is the same.
    let mut other = fresh_policy();
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

#[test]
fn a_missing_reference_policy_is_an_error() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let part = SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() };
    assert!(!policy.has_ref_policy());
    for error in [policy.score(Weights::RefPolicy, &[part]).unwrap_err(), policy.mix_ref_policy(0.5).unwrap_err()] {
        assert!(error.to_string().contains("freeze_ref_policy"), "{error}");
    }
    assert_eq!(policy.num_parameters(), weights(&policy).iter().map(|tensor| tensor.data.len()).sum::<usize>());
}

/// Returns a policy with a value head, and its batches with old values and returns: two of five values are clipped.
fn critic(sequences: &[Sequence]) -> (CpuPolicy, Vec<SequenceBatch<'_>>) {
    let mut policy = fresh_policy();
    let mut parts = batches(&mut policy, sequences);
    policy = policy.with_value_head(ValueLossConfig::default()).unwrap();
    let returns = [[0.5, 1.0, 0.0], [-1.0, 0.5, 1.0]];
    for (part, returns) in parts.iter_mut().zip(returns) {
        let tokens = part.tokens.tokens();
        let targets =
            ValueTargets { old_values: [0.0, 0.4, -0.05][..tokens].to_vec(), returns: returns[..tokens].to_vec() };
        part.tokens = part.tokens.clone().with_value_targets(targets).unwrap();
        part.tokens = part
            .tokens
            .clone()
            .with_weights(TokenWeights { policy: vec![0.2; tokens], ..TokenWeights::zeros(tokens) })
            .unwrap();
    }
    (policy, parts)
}

fn named<'a>(tensors: &'a [NamedTensor], name: &str) -> &'a NamedTensor {
    tensors.iter().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn a_value_head_is_trained_with_the_policy_and_saved() {
    let sequences = sequences();
    let (mut policy, parts) = critic(&sequences);
    assert_eq!(policy.values(&parts).unwrap(), [0.0; 5], "a new value head returns 0");
    let first = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The values 0 are clipped for each second token, whose old value is 0.4: (0.2 - 1)^2 < 1 and (0.2 - 0.5)^2 < 0.25, so the unclipped
    // squares count.
    let squares = [0.25, 1.0, 1.0, 0.25, 1.0];
    assert!((first.value_loss - 0.5 * squares.iter().sum::<f64>() / 5.0).abs() < 1e-6, "{}", first.value_loss);
    assert_eq!(first.metrics.value("value_pred_mean"), Some(0.0));
    assert!((first.metrics.value("return_mean").unwrap() - 0.4).abs() < 1e-6);
    policy.apply(0.05).unwrap();
    let values = policy.values(&parts).unwrap();
    assert!(values.iter().all(|value| *value != 0.0), "{values:?}");
    let weights = weights(&policy);
    assert_eq!(named(&weights, "value_head.weight").shape, [16, 1]);
    assert!(named(&weights, "value_head.bias").data[0] > 0.0, "most returns are above 0");
    // The reference policy has no value head, but can be mixed.
    policy.freeze_ref_policy().unwrap();
    policy.mix_ref_policy(0.5).unwrap();
    let of_ref = export_all(&policy, StateGroup::Weights(Weights::RefPolicy)).unwrap();
    assert!(of_ref.iter().all(|tensor| !tensor.name.starts_with("value_head")));
    assert_eq!(of_ref.len() + 2, weights.len());

    let optimizer = export_all(&policy, StateGroup::Optimizer).unwrap();
    assert!(optimizer.iter().any(|tensor| tensor.name == "exp_avg.value_head.weight"));
    let (mut resumed, _) = critic(&sequences);
    let adamw = AdamWConfig::default();
    let state = PolicyState {
        policy: &weights,
        ref_policy: Some(&of_ref),
        optimizer: &optimizer,
        optimizer_steps: 1,
        adamw: &adamw,
    };
    resumed.import(&state).unwrap();
    for policy in [&mut policy, &mut resumed] {
        policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        policy.apply(0.05).unwrap();
    }
    assert_eq!(bits(&policy.values(&parts).unwrap()), bits(&resumed.values(&parts).unwrap()));
}

#[test]
fn the_gradient_of_the_value_loss_matches_plain_burn_through_the_whole_model() {
    let sequences = sequences();
    let (mut policy, parts) = critic(&sequences);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    policy.apply(0.05).unwrap();
    // Subtract the gradient of the policy loss from the gradient of both losses.
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let with = std::mem::take(&mut policy.sums);
    let mut without = fresh_policy();
    without.freeze_ref_policy().unwrap();
    without.model = policy.model.clone();
    let bare: Vec<_> = (sequences.chunks(1).zip(&parts))
        .map(|(sequences, part)| SequenceBatch {
            sequences,
            tokens: token_batch(sequences)
                .unwrap()
                .with_advantages(part.tokens.advantages().clone())
                .unwrap()
                .with_ref_logp(part.tokens.ref_logp().unwrap().to_vec())
                .unwrap()
                .with_weights(part.tokens.weights().unwrap().clone())
                .unwrap(),
        })
        .collect();
    without.accumulate(&bare, StepLoss::Grpo).unwrap();

    let mut want = GradientSum::new();
    for part in &parts {
        let targets = part.tokens.value_targets().unwrap();
        let model = policy.model.clone().fork(&policy.model.device());
        let values = model.values(completion_hidden(&model, part.sequences).unwrap()).unwrap();
        let column = |values: &[f32]| {
            Tensor::<2>::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), &model.device())
        };
        let (old, returns) = (column(&targets.old_values), column(&targets.returns));
        let clipped = values.clone().max_pair(old.clone() - 0.2).min_pair(old + 0.2);
        let squares = (values - returns.clone()).powi_scalar(2).max_pair((clipped - returns).powi_scalar(2));
        want.add(&model, (squares.sum() * (0.5 * 0.5 * 0.2)).backward());
    }
    assert!(want.norm() > 0.01, "{}", want.norm());
    for ((with, without), want) in with.parameters().iter().zip(without.sums.parameters()).zip(want.parameters()) {
        let largest = want.data.iter().fold(0f32, |most, g| most.max(g.abs()));
        for ((with, without), want) in with.data.iter().zip(&without.data).zip(&want.data) {
            assert!((with - without - want).abs() <= 1e-5 * largest.max(0.05), "{with} {without} {want}");
        }
    }
    assert!(want.parameters().iter().any(|p| p.name == "embed_tokens" && p.data.iter().any(|g| *g != 0.0)));
}

#[test]
fn a_value_head_needs_value_targets_and_vice_versa() {
    let sequences = sequences();
    let (mut critic, parts) = critic(&sequences);
    let mut policy = fresh_policy();
    assert!(matches!(policy.values(&parts), Err(Error::NoValueHead)));
    policy.freeze_ref_policy().unwrap();
    assert!(matches!(policy.accumulate(&parts, StepLoss::Grpo), Err(Error::NoValueHead)));
    let bare = batches(&mut policy, &sequences);
    assert!(critic.accumulate(&bare, StepLoss::Grpo).unwrap_err().to_string().contains("value head"));
    critic.accumulate(&bare, StepLoss::CrossEntropy { tokens: 5 }).unwrap();
    assert!(fresh_policy().with_value_head(ValueLossConfig { vf_coef: f64::NAN, ..Default::default() }).is_err());
}
