//! What every policy owes a training loop, held by the one in burn.

use super::*;
use grpo_core::{Advantages, Implementation, LossConfig};
use models::NamedTensor;
use policy::{Sequence, export_all, token_batch};
use std::sync::Arc;

fn fresh_policy() -> BurnPolicy {
    let config = ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() };
    let loss = PolicyLoss {
        config: LossConfig { beta: 0.1, ..LossConfig::default() },
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 8,
    };
    BurnPolicy::new(&config, 1, loss).unwrap()
}

fn sequences() -> [Sequence; 2] {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    [of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

/// The two sequences as two micro-batches, with everything that the loss wants.
fn batches<'a>(policy: &mut BurnPolicy, sequences: &'a [Sequence]) -> Vec<SequenceBatch<'a>> {
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

fn weights(policy: &BurnPolicy) -> Vec<NamedTensor> {
    export_all(policy, StateGroup::Weights(Weights::Policy)).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn scores_are_those_of_the_loss_and_of_the_weights_that_are_asked_for() {
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
    // burn's forward pass may round differently with gradients; the loss itself does not.
    assert!(output.scores.logp.iter().zip(&scores.logp).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_eq!(output.metrics.value("clip_ratio/region_mean"), Some(0.0));
    // The reference policy has the same weights here, but is another set of them.
    policy.apply(0.1).unwrap();
    assert_ne!(bits(&policy.score(Weights::Policy, &parts).unwrap().logp), bits(&scores.logp));
    assert_eq!(bits(&policy.score(Weights::RefPolicy, &parts).unwrap().logp), bits(&scores.logp));
}

#[test]
fn a_failed_accumulation_leaves_no_gradient() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let mut parts = batches(&mut policy, &sequences);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The second micro-batch has a token that the model does not.
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[1].clone() }];
    parts[1].sequences = &unknown;
    let error = policy.accumulate(&parts, StepLoss::Grpo).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(policy.apply(0.1).is_err(), "there is nothing to apply");
}

#[test]
fn gradients_stay_until_an_update_takes_them() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let parts = batches(&mut policy, &sequences);
    let norm = |policy: &mut BurnPolicy| policy.skip().unwrap().grad_norm;
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let whole = norm(&mut policy);
    assert!(whole > 0.0);
    assert_eq!(norm(&mut policy), 0.0, "what is dropped is gone");
    // One call with both micro-batches, or one call for each.
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
    let step = |policy: &mut BurnPolicy| policy.accumulate(&parts, StepLoss::CrossEntropy { tokens: 5 }).unwrap().loss;
    let before = step(&mut policy);
    policy.apply(0.01).unwrap();
    assert!(step(&mut policy) < before - 0.01);
}

#[test]
fn a_step_that_failed_is_taken_back_and_a_state_comes_back_bit_for_bit() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let parts = batches(&mut policy, &sequences);
    let step = |policy: &mut BurnPolicy| {
        policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        policy.apply(0.01).unwrap();
        policy.mix_ref_policy(0.5).unwrap();
    };
    let of = StateGroup::Weights;
    let groups = [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer];
    let all = |policy: &BurnPolicy| groups.map(|group| export_all(policy, group).unwrap());
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

    // Continued from the tensors, in another order, the next step is the same.
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
    let short = PolicyState { optimizer: &moments[1..], ..state };
    let untouched = all(&other);
    assert!(matches!(other.import(&short), Err(Error::State { .. })));
    assert_eq!(all(&other), untouched, "what does not fit changes nothing");
    other.import(&state).unwrap();
    assert_eq!(all(&other), before);
    step(&mut policy);
    step(&mut other);
    assert_eq!(all(&other), all(&policy));
}

#[test]
fn what_is_not_there_is_said() {
    let (mut policy, sequences) = (fresh_policy(), sequences());
    let part = SequenceBatch { sequences: &sequences, tokens: token_batch(&sequences).unwrap() };
    assert!(!policy.has_ref_policy());
    for error in [policy.score(Weights::RefPolicy, &[part]).unwrap_err(), policy.mix_ref_policy(0.5).unwrap_err()] {
        assert!(error.to_string().contains("freeze_ref_policy"), "{error}");
    }
    assert_eq!(policy.num_parameters(), weights(&policy).iter().map(|tensor| tensor.data.len()).sum::<usize>());
}
