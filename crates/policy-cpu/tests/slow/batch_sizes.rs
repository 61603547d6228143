//! Sampling from a model whose products are divided among threads, in batches of different sizes.

use crate::support::policy_loss;
use grpo_backend_cpu::CpuBackend;
use grpo_core::Dtype;
use grpo_models::ModelConfig;
use grpo_policy::{LogitsProcessors, Policy, RolloutRequest, Sampling};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use grpo_rng::Purpose;
use std::sync::Arc;

#[test]
fn samples_of_a_large_bf16_model_are_those_of_every_batch_size() {
    assert_every_batch_size(Dtype::Bf16);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn samples_of_a_large_f32_model_are_those_of_every_batch_size() {
    assert_every_batch_size(Dtype::F32);
}

fn assert_every_batch_size(dtype: Dtype) {
    // The weights are beyond the number from which threads divide products.
    let config = ModelConfig {
        vocab_size: 64,
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 3,
        ..ModelConfig::default()
    };
    assert!(config.parameter_count() >= 1 << 25);
    let prompts = [vec![1, 5, 6], vec![1, 9], vec![1, 4, 7, 8]];
    let sampling = Sampling::Random {
        temperature: 1.0,
        processors: LogitsProcessors::default(),
        seed: 3,
        purpose: Purpose::Rollout,
        step: 0,
        first: 0,
    };
    let request = RolloutRequest {
        prompts: &prompts,
        num_generations: 2,
        max_completion_length: 4,
        stop_ids: &[2],
        stop: None,
        sampling,
        turn: None,
        return_sampling_mask: false,
        return_routed_experts: false,
    };
    let loss = PolicyLoss { backend: Arc::new(CpuBackend::new().with_products(dtype)), ..policy_loss() };
    let mut policy = CpuPolicy::new(&config, 1, loss).unwrap().with_products(dtype).unwrap();
    let together = policy.generate(&request).unwrap();
    assert_eq!(policy.with_rollout_batch_size(1).generate(&request).unwrap(), together, "{dtype:?}");
}
