//! Quantised weights on meshes that divide the matrices, but neither the blocks of their rows nor the words of their codes.

use crate::mesh_support::{on_mesh, sequences};
use crate::quantization::{config, policy, quantized, weights};
use crate::support::{assert_close, assert_same_gradients, cross_entropy, gradients, halves, request, runtime, whole};
use grpo_models::{Dtype, ModelConfig, Quantization};
use grpo_policy::{Policy, Sampling, Weights};
use grpo_policy_pjrt::Runtime;
use rstest::rstest;

/// Rows of 192 values are three blocks of 64, and the 24 rows of keys are three words of eight codes, or six of four.
#[rstest]
#[case(Quantization::Nf4, &[("fsdp", 8)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Nf4, &[("data", 2), ("fsdp", 4)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Nf4, &[("fsdp", 2), ("tensor", 4)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Int8, &[("fsdp", 8)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Int8, &[("data", 2), ("fsdp", 4)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Int8, &[("fsdp", 2), ("tensor", 4)])]
#[ignore = "GRPO_TESTS=all"]
#[case(Quantization::Nf4, &[("tensor", 8)])]
fn uneven_blocks_and_words_match_one_device(#[case] quantization: Quantization, #[case] axes: &[(&str, usize)]) {
    let config = ModelConfig {
        hidden_size: 192,
        intermediate_size: 320,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: Some(6),
        ..config()
    };
    let (_place, weights) = weights(&config, Dtype::F32, None);
    let all = sequences();
    let of = |runtime: &Runtime| {
        let mut policy = policy(runtime, &config, &weights, quantized(quantization));
        let scores = policy.score(Weights::Policy, &[whole(&all)]).unwrap();
        policy.accumulate(&halves(&all), cross_entropy(&all)).unwrap();
        let gradients = gradients(&mut policy);
        let prompts = [vec![1, 5, 6], vec![9], vec![3, 4]];
        let completions = policy.generate(&request(&prompts, 2, 12, &[2], Sampling::Greedy)).unwrap();
        (scores, gradients, completions)
    };
    let ((expected, expected_gradients, expected_completions), (found, found_gradients, completions)) =
        (of(runtime()), of(&on_mesh(axes)));
    assert_close("log-probabilities", &found.logp, &expected.logp, 1e-5);
    assert_close("entropies", &found.entropy, &expected.entropy, 1e-5);
    assert_same_gradients("gradients", &found_gradients, &expected_gradients, 1e-5);
    let ids = |all: &[grpo_policy::Completion]| all.iter().map(|one| one.ids.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&completions), ids(&expected_completions));
}
