//! Models with Gated DeltaNets: gradients and steps match torch, and samples do not depend on slots.
//!
//! The norms of queries, keys and outputs divide by small numbers, so these models amplify rounding errors more than others.

use crate::checkpoint::{self, Checkpoint, Settings, Tensors};
use crate::support::{
    assert_close, assert_same_tensors, blocks_of, cross_entropy, device_weights, expected_gradients, exported,
    gradients, halves, on_device, random, request, rollout, whole,
};
use policy::{Completion, LogitsProcessors, Policy, Sampling, Sequence, SequenceBatch, StepLoss};
use policy_pjrt::{PjrtPolicyOptions, TrainShape};
use stablehlo::{Dtype, Save};

/// The allowed error of log-probabilities.
const LOGPS: f32 = 1e-5;
/// The allowed error of gradients.
const GRADIENTS: f32 = 1e-4;

#[test]
fn gradients_with_every_save_policy_match_torch() {
    let of = |save, attention| PjrtPolicyOptions { save, attention, ..PjrtPolicyOptions::default() };
    let all = [Save::Carry, Save::Every(5), Save::Products, Save::Everything].map(|save| of(save, blocks_of(7)));
    for name in checkpoint::GATED_DELTA_NETS {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.completions();
        let expected = expected_gradients(&checkpoint.expected);
        for options in std::iter::once(PjrtPolicyOptions::default()).chain(all.clone()) {
            let what = format!("{name}, {:?}", options.save);
            let mut policy = on_device(&checkpoint, options);
            let found = policy.accumulate(&halves(&sequences), cross_entropy(&sequences)).unwrap().loss;
            let loss = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
            assert!((found - loss).abs() < 1e-4 * loss, "{what}: {found} {loss}");
            assert_same_tensors(&what, &gradients(&mut policy), &expected, GRADIENTS);
        }
    }
}

/// All sequences of a checkpoint in one row; the other row is a masked sequence with the length of all others together.
#[test]
fn gradients_of_packed_rows_match_torch() {
    for name in checkpoint::GATED_DELTA_NETS {
        let checkpoint = Checkpoint::open(name);
        let mut sequences = checkpoint.completions();
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        sequences.push(Sequence { prompt: vec![3], completion: vec![4; tokens] });
        let shape = TrainShape::of(&sequences);
        assert!(shape.rows == 2 && shape.shared, "{name}: {shape:?}");
        let mask: Vec<f32> = (0..2 * tokens).map(|t| if t < tokens { 1.0 } else { 0.0 }).collect();
        let SequenceBatch { sequences, tokens: batch } = whole(&sequences);
        let batch = SequenceBatch { sequences, tokens: batch.with_mask(&mask).unwrap() };
        let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
        policy.accumulate(&[batch], StepLoss::CrossEntropy { tokens }).unwrap();
        assert_same_tensors(name, &gradients(&mut policy), &expected_gradients(&checkpoint.expected), GRADIENTS);
    }
}

#[test]
fn an_optimizer_step_matches_torch() {
    for name in checkpoint::GATED_DELTA_NETS {
        let checkpoint = Checkpoint::open(name);
        let path = checkpoint.folder.path().join("adamw.safetensors");
        let settings = Settings::read(&path);
        let sequences = checkpoint.completions();
        let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
        policy.reset_optimizer(&settings.adamw()).unwrap();
        policy.accumulate(&halves(&sequences), cross_entropy(&sequences)).unwrap();
        assert!(policy.apply(settings.number("lr")).unwrap().applied);
        let expected = Tensors::read(&path).0;
        for (parameter, found) in exported(&policy) {
            let before = checkpoint.weights.tensor(&parameter).unwrap().to_vec();
            // Compare updates, not weights.
            let step = |after: &[f32]| after.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            let expected = step(&expected[&parameter].data);
            assert_close(&format!("{name}: {parameter}"), &step(&found.data), &expected, 2e-4);
        }
    }
}

/// Fails unless tokens are equal, and log-probabilities within their allowed error.
#[track_caller]
pub(crate) fn assert_same_samples(what: &str, found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.ids, found.truncated), (&expected.ids, expected.truncated), "{what}, sample {i}");
        for (found, expected) in found.logps.iter().zip(&expected.logps) {
            assert!((found - expected).abs() < LOGPS, "{what}, sample {i}: {found} {expected}");
        }
    }
}

/// Slots are refilled while the states of others are in progress, and finished slots keep theirs.
#[test]
fn completions_do_not_depend_on_slots() {
    let checkpoint = Checkpoint::open("qwen3_5");
    let weights = device_weights(&checkpoint, Dtype::F32);
    let prompts =
        [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..70).map(|i| i % 60).collect()];
    for sampling in [Sampling::Greedy, random(1.0, LogitsProcessors::default(), 0)] {
        let request = request(&prompts, 3, 19, &[5, 6, 7, 8], sampling);
        let of = |slots, per_call| rollout(&checkpoint, slots, per_call).generate(&weights, &request).unwrap();
        let all = of(64, 16);
        assert!(all.iter().any(|completion| !completion.truncated), "slots are refilled at different times");
        assert_same_samples("eight slots", &of(8, 16), &all);
        assert_same_samples("four tokens per call", &of(8, 4), &all);
    }
}
