//! Packed rows: gradients and scores match those of separate rows and torch, in every family.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{
    Named, assert_close, assert_near, assert_same_losses, assert_same_scores, assert_same_tensors, blocks_of,
    expected_gradients, gradients, host_gradients, import, moved, on_device, on_host, to_host, whole,
};
use crate::value_head::{batch, parts, value_loss};
use grpo_models::{LoraConfig, TargetModules};
use grpo_policy::{OptimizerSettings, Policy, Sequence, SequenceBatch, StepLoss, Weights};
use grpo_policy_pjrt::decoder::Attention;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, TrainShape};
use rstest::rstest;

/// Options with materialised attention, and with blocks whose boundaries lie within sequences.
fn options() -> [PjrtPolicyOptions; 2] {
    [Attention::Materialised, blocks_of(5)]
        .map(|attention| PjrtPolicyOptions { attention, ..PjrtPolicyOptions::default() })
}

#[test]
fn gradients_of_packed_rows_match_torch_and_the_cpu_policy() {
    assert_packed(["gpt_oss"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn gradients_of_packed_rows_of_every_family_match_torch_and_the_cpu_policy() {
    assert_packed(checkpoint::ALL);
}

/// Packs all sequences of a checkpoint into one of two rows; the other row is a masked sequence with the length of all others together.
fn assert_packed(names: impl IntoIterator<Item = &'static str>) {
    for (name, options) in names.into_iter().zip(options().into_iter().cycle()) {
        let checkpoint = Checkpoint::open(name);
        let mut sequences = checkpoint.completions();
        let tokens: usize = sequences.iter().map(|s| s.completion.len()).sum();
        let loss = StepLoss::CrossEntropy { tokens };
        let mut host = on_host(&checkpoint);
        host.accumulate(&[whole(&sequences)], loss).unwrap();

        sequences.push(Sequence { prompt: vec![3], completion: vec![4; tokens] });
        let shape = TrainShape::of(&sequences);
        assert!(shape.rows == 2 && shape.shared, "{name}: {shape:?}");
        let mask: Vec<f32> = (0..2 * tokens).map(|t| if t < tokens { 1.0 } else { 0.0 }).collect();
        let SequenceBatch { sequences, tokens, .. } = whole(&sequences);
        let batch = SequenceBatch { routed_experts: &[], sequences, tokens: tokens.with_mask(&mask).unwrap() };
        let mut policy = on_device(&checkpoint, options);
        let found = policy.accumulate(&[batch], loss).unwrap().loss;
        assert_near(name, found, checkpoint.expected.0["expected.loss"].data[0].into());
        let compared = |mut all: Named| {
            all.retain(|tensor, _| !checkpoint::has_no_gradient(name, tensor));
            all
        };
        let (found, expected) = (compared(gradients(&mut policy)), compared(expected_gradients(&checkpoint.expected)));
        assert_same_tensors(&format!("{name}, torch"), &found, &expected, 1e-4);
        assert_same_tensors(&format!("{name}, host"), &found, &compared(host_gradients(&host)), to_host(name));
    }
}

/// Returns sequences for 4 rows of 16 tokens: one fills a row, three fill another one, and one row has padding.
fn sequences(config: &grpo_models::ModelConfig) -> Vec<Sequence> {
    let lengths = [(4, 6), (3, 14), (2, 5), (1, 1), (5, 9), (2, 2), (3, 3)];
    let mut next = 7;
    let mut tokens = |count: usize| -> Vec<u32> {
        let draw = |_| {
            next = (next * 1_103 + 12_345) % 1_000_003;
            next % config.vocab_size as u32
        };
        (0..count).map(draw).collect()
    };
    lengths.iter().map(|(p, c)| Sequence { prompt: tokens(*p), completion: tokens(*c) }).collect()
}

/// Creates a policy with nonzero adapters of all matrices and a nonzero value head.
fn extended(checkpoint: &Checkpoint, options: PjrtPolicyOptions) -> PjrtPolicy {
    let all = TargetModules::Pattern("all-linear".into());
    let lora = LoraConfig { r: 2, target_modules: all, ..LoraConfig::default() };
    let policy = on_device(checkpoint, options).with_lora(&lora, 3).unwrap();
    let mut policy = policy.with_value_head(value_loss()).unwrap();
    // Adapters of this rank are scaled by 16, and a large B would amplify rounding errors tenfold.
    let weights = moved(&policy, 0.02);
    import(&mut policy, &weights, None, &[], 0, &OptimizerSettings::default());
    policy
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::materialised("qwen2", options()[0].clone())]
#[ignore = "GRPO_TESTS=all"]
#[case::blockwise("llama3", options()[1].clone())]
fn packed_adapters_values_and_losses_match_separate_rows(#[case] name: &str, #[case] options: PjrtPolicyOptions) {
    let checkpoint = Checkpoint::open(name);
    let sequences = sequences(checkpoint.config());
    assert_eq!(
        TrainShape::of(&sequences),
        TrainShape { rows: 4, length: 16, tokens: 48, shared: true, ..TrainShape::default() }
    );
    let one = [batch(&sequences)];
    let alone = parts(&one[0], 1);
    let mut policy = extended(&checkpoint, options);
    policy.freeze_ref_policy().unwrap();
    let [found, expected] = [&one[..], &alone].map(|batches| policy.values(batches).unwrap());
    assert_close(&format!("{name}: values"), &found, &expected, 1e-5);
    for of in [Weights::Policy, Weights::RefPolicy] {
        let [found, expected] = [&one[..], &alone].map(|batches| policy.score(of, batches).unwrap());
        assert_same_scores(&format!("{name}: {of:?}"), &found, &expected);
    }
    let [found, expected] = [&one[..], &alone].map(|batches| {
        let output = policy.accumulate(batches, StepLoss::Grpo).unwrap();
        let gradients = gradients(&mut policy);
        policy.skip().unwrap();
        (output, gradients)
    });
    assert_same_losses(name, &found.0, &expected.0);
    assert_same_tensors(name, &found.1, &expected.1, 1e-5);
}
