//! A training on a mesh that begins every update with the numbers of one device, and its comparison.

use crate::mesh_support::sequences;
use crate::prefills::rows_of_prefills;
use crate::support::{
    Named, assert_close, assert_same_gradients, assert_same_tensors, by_name, gradients, import, random, request,
    state, whole,
};
use grpo_models::NamedTensor;
use grpo_policy::contract::batches;
use grpo_policy::{LogitsProcessors, OptimizerSettings, Policy, RolloutRequest, StepLoss, TensorSource, Turn, Weights};
use grpo_policy_pjrt::PjrtPolicy;

/// The results of a training on some mesh.
#[derive(PartialEq)]
pub(crate) struct Trained {
    scores: grpo_core::Scores,
    gradients: Named,
    /// The weights of both policies and the moments after each update.
    states: Vec<[Vec<NamedTensor>; 3]>,
    pub(crate) completions: Vec<grpo_policy::Completion>,
    logits: Vec<Vec<f32>>,
    cached_logits: Vec<Vec<f32>>,
    /// The share of rows without a sequence in the last update.
    pub(crate) rows_empty: Option<f64>,
    /// The load balancing loss of experts in the last update.
    pub(crate) aux_loss: Option<f64>,
}

/// Trains for three updates: of two micro-batches, of one, and of one at once. The reference policy follows.
pub(crate) fn train(policy: PjrtPolicy) -> Trained {
    train_from(policy, None)
}

/// Trains like [`train`]. After each update the policy gets the state of `leader`, so every update and the samples of both begin from equal
/// numbers: updates of AdamW amplify rounding errors, on some processors by more than an error in a shard would change.
pub(crate) fn train_beside(leader: &Trained, policy: PjrtPolicy) -> Trained {
    train_from(policy, Some(leader))
}

fn train_from(mut policy: PjrtPolicy, leader: Option<&Trained>) -> Trained {
    let all = sequences();
    // A learning rate below epsilon does not amplify differences of gradients.
    let adamw = OptimizerSettings { adam_epsilon: 0.03, ..OptimizerSettings::default() };
    policy.reset_optimizer(&adamw).unwrap();
    let mut states = vec![];
    let mut end_update = |policy: &mut PjrtPolicy| {
        states.push(state(policy));
        if let Some(leader) = leader {
            let [weights, ref_policy, optimizer] = &leader.states[states.len() - 1];
            let ref_policy = (!ref_policy.is_empty()).then_some(ref_policy as &dyn TensorSource);
            import(policy, weights, ref_policy, optimizer, states.len() as u64, &adamw);
        }
    };
    let parts = batches(&mut policy, &all, 1);
    let scores = policy.score(Weights::Policy, &[whole(&all)]).unwrap();
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let gradients = gradients(&mut policy);
    assert!(policy.apply(0.02).unwrap().applied);
    end_update(&mut policy);
    let whole_batch = batches(&mut policy, &all, 2);
    policy.accumulate(&whole_batch, StepLoss::Grpo).unwrap();
    assert!(policy.apply(0.02).unwrap().applied);
    let has_adapters = gradients.keys().any(|name| name.contains("lora"));
    if !has_adapters {
        policy.mix_ref_policy(0.25).unwrap();
    }
    end_update(&mut policy);
    let (output, report) = policy.step(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }, 0.02).unwrap();
    assert!(report.applied);
    end_update(&mut policy);
    let prompts: Vec<Vec<u32>> = vec![vec![1, 5, 6], vec![9], vec![3, 4]];
    let sampling = random(
        1.0,
        LogitsProcessors { repetition_penalty: Some(1.2), top_k: Some(20), ..LogitsProcessors::default() },
        0,
    );
    let mut completions = policy.generate(&request(&prompts, 6, 20, &[2], sampling)).unwrap();
    completions.extend(two_turns(&mut policy, &prompts));
    let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let (mut logits, mut cached_logits) = (vec![], vec![]);
    policy.logits(&rows, |_, _, row| logits.push(row.to_vec())).unwrap();
    policy.cached_logits(&rows, |_, _, row| cached_logits.push(row.to_vec())).unwrap();
    let [rows_empty, aux_loss] = ["frac_rows_empty", "aux_loss"].map(|name| output.metrics.value(name));
    Trained { scores, gradients, states, completions, logits, cached_logits, rows_empty, aux_loss }
}

/// Returns the completions of two turns of conversations; the second one continues.
fn two_turns(policy: &mut PjrtPolicy, prompts: &[Vec<u32>]) -> Vec<grpo_policy::Completion> {
    let (mut conversations, mut all) = (prompts.to_vec(), vec![]);
    for number in 0..2 {
        let streams: Vec<u64> = (0..3).map(|index| (number << 32) + index).collect();
        let turn = Some(Turn { streams: &streams, limits: &[5, 4, 6], finished: None });
        let sampling = random(1.0, LogitsProcessors::default(), 0);
        let request = RolloutRequest { turn, ..request(&conversations, 1, 60, &[2], sampling) };
        let (completions, prefills) = rows_of_prefills(|| policy.generate(&request).unwrap());
        assert_eq!(prefills.is_empty(), number == 1, "{prefills:?}");
        for (conversation, completion) in conversations.iter_mut().zip(&completions) {
            let between = [4, 9, 11].iter().cycle().take(3 + 5 * conversation.len());
            conversation.extend(completion.ids.iter().chain(between));
        }
        all.extend(completions);
    }
    all
}

/// The allowed difference of dense models.
pub(crate) const SAME: f32 = 1e-5;

/// Fails unless completions are equal, and all numbers within [`SAME`].
pub(crate) fn assert_same(what: &str, found: &Trained, expected: &Trained) {
    assert_within(what, found, expected, SAME);
}

/// Fails unless completions are equal, and all numbers within `tolerance`.
pub(crate) fn assert_within(what: &str, found: &Trained, expected: &Trained, tolerance: f32) {
    assert_close(&format!("{what}: logp"), &found.scores.logp, &expected.scores.logp, tolerance);
    assert_close(&format!("{what}: entropy"), &found.scores.entropy, &expected.scores.entropy, tolerance);
    assert_same_gradients(&format!("{what}: gradients"), &found.gradients, &expected.gradients, tolerance);
    assert_eq!(found.states.len(), expected.states.len(), "{what}");
    for (update, (found, expected)) in found.states.iter().zip(&expected.states).enumerate() {
        for ((group, found), expected) in ["weights", "reference policy", "moments"].iter().zip(found).zip(expected) {
            let what = format!("{what}: {group} after update {update}");
            // Biases, norms and adapters of a reference policy begin as zeros.
            let (zeros, expected): (Vec<_>, Vec<_>) =
                expected.iter().cloned().partition(|tensor| tensor.data.iter().all(|value| *value == 0.0));
            let (found_zeros, found): (Vec<_>, Vec<_>) =
                found.iter().cloned().partition(|tensor| zeros.contains(tensor));
            assert_eq!(found_zeros, zeros, "{what}");
            // Second moments are squares, which double relative errors.
            let (squares, others): (Vec<_>, Vec<_>) =
                expected.into_iter().partition(|tensor| tensor.name.starts_with("exp_avg_sq."));
            let (found_squares, found): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|tensor| tensor.name.starts_with("exp_avg_sq."));
            assert_same_tensors(&what, &by_name(found), &by_name(others), tolerance);
            assert_same_tensors(&what, &by_name(found_squares), &by_name(squares), 2.0 * tolerance);
        }
    }
    let ids = |trained: &Trained| trained.completions.iter().map(|c| c.ids.clone()).collect::<Vec<_>>();
    assert_eq!(ids(found), ids(expected), "{what}");
    let logps = |trained: &Trained| trained.completions.iter().flat_map(|c| c.logps.clone()).collect::<Vec<_>>();
    assert_close(&format!("{what}: log-probabilities"), &logps(found), &logps(expected), tolerance);
    assert_close(&format!("{what}: logits"), &found.logits.concat(), &expected.logits.concat(), tolerance);
    let [found, expected] = [found, expected].map(|trained| trained.cached_logits.concat());
    assert_close(&format!("{what}: cached logits"), &found, &expected, tolerance);
}
