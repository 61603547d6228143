//! Models with Gated DeltaNets: packed rows and recomputation give the gradients of torch, and samples do not depend on slots.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{
    assert_close, assert_near, assert_same_completions, assert_same_tensors, blocks_of, both, cross_entropy,
    device_weights, expected_gradients, gradients, halves, host_gradients, host_loss, on_device, random, request,
    rollout, runtime, whole,
};
use grpo_core::LossConfig;
use grpo_models::{LayerSpec, LinearAttention, ModelConfig};
use grpo_policy::{LogitsProcessors, Policy, Sampling, Sequence, SequenceBatch, StepLoss};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, TrainShape};
use grpo_stablehlo::{Dtype, Save};
use rstest::rstest;

/// The allowed error of gradients.
const GRADIENTS: f32 = 1e-4;

#[test]
#[ignore = "GRPO_TESTS=all"]
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
            assert_near(&what, found, checkpoint.expected.0["expected.loss"].data[0].into());
            assert_same_tensors(&what, &gradients(&mut policy), &expected, GRADIENTS);
        }
    }
}

/// All sequences of a checkpoint in one row; the other row is a masked sequence with the length of all others together.
#[rstest]
#[case::text("qwen3_5")]
#[ignore = "GRPO_TESTS=all"]
#[case::images("qwen3_5_vision")]
fn gradients_of_packed_rows_match_torch(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let mut sequences = checkpoint.completions();
    let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
    sequences.push(Sequence { prompt: vec![3], completion: vec![4; tokens] });
    let shape = TrainShape::of(&sequences);
    assert!(shape.rows == 2 && shape.shared, "{name}: {shape:?}");
    let mask: Vec<f32> = (0..2 * tokens).map(|t| if t < tokens { 1.0 } else { 0.0 }).collect();
    let SequenceBatch { sequences, tokens: batch, .. } = whole(&sequences);
    let batch = SequenceBatch { routed_experts: &[], sequences, tokens: batch.with_mask(&mask).unwrap() };
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    policy.accumulate(&[batch], StepLoss::CrossEntropy { tokens }).unwrap();
    assert_same_tensors(name, &gradients(&mut policy), &expected_gradients(&checkpoint.expected), GRADIENTS);
}

/// Slots are refilled while the states of others are in progress, and finished slots keep theirs.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::greedy(Sampling::Greedy)]
#[case::random(random(1.0, LogitsProcessors::default(), 0))]
fn completions_do_not_depend_on_slots(#[case] sampling: Sampling) {
    let checkpoint = Checkpoint::open("qwen3_5");
    let weights = device_weights(&checkpoint, Dtype::F32);
    let prompts =
        [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], (0..70).map(|i| i % 60).collect()];
    let request = request(&prompts, 3, 19, &[5, 6, 7, 8], sampling);
    let of = |slots, per_call| rollout(&checkpoint, slots, per_call).generate(&weights, &request).unwrap();
    let all = of(64, 16);
    assert!(all.iter().any(|completion| !completion.truncated), "slots are refilled at different times");
    assert_same_completions("eight slots", &of(8, 16), &all);
    assert_same_completions("four tokens per call", &of(8, 4), &all);
}

/// A model without keys and values.
#[test]
fn a_model_of_gated_delta_nets_alone_matches_the_cpu_policy() {
    let config = ModelConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        // Larger weights amplify rounding errors of these layers: a range of 0.3 by a factor of 50.
        initializer_range: 0.1,
        layers: vec![LayerSpec::GATED_DELTA_NET],
        linear_attention: Some(LinearAttention {
            linear_key_head_dim: 8,
            linear_value_head_dim: 8,
            ..LinearAttention::default()
        }),
        ..ModelConfig::default()
    };
    let mut host = CpuPolicy::new(&config, 3, host_loss(LossConfig::default())).unwrap();
    let mut device =
        PjrtPolicy::new(runtime(), &config, 3, LossConfig::default(), PjrtPolicyOptions::default()).unwrap();
    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25]];
    let request = request(&prompts, 3, 19, &[5, 6], Sampling::Greedy);
    let [found, expected] = both(&mut device, &mut host, |policy| policy.generate(&request).unwrap());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.ids, expected.ids);
        assert_close("log-probabilities", &found.logps, &expected.logps, 1e-5);
    }
    let sequences: Vec<Sequence> = prompts
        .iter()
        .zip(found.iter().step_by(3))
        .map(|(prompt, completion)| Sequence { prompt: prompt.clone(), completion: completion.ids.clone() })
        .collect();
    let (parts, loss) = (halves(&sequences), cross_entropy(&sequences));
    let [found, expected] = both(&mut device, &mut host, |policy| policy.accumulate(&parts, loss).unwrap().loss);
    assert_near("loss", found, expected);
    assert_same_tensors("gradients", &gradients(&mut device), &host_gradients(&host), 2e-5);
}
