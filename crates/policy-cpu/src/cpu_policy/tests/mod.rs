//! The contract of [`Policy`] on [`CpuPolicy`].

use super::*;
use grpo_backend_cpu::CpuBackend;
use grpo_core::Implementation;
use grpo_policy::contract::{Fixture, Setup};
use std::sync::Arc;

struct Cpu;

impl Fixture for Cpu {
    // The forward pass may round differently with gradients; the loss itself does not.
    const SCORE_TOLERANCE: f32 = 1e-5;

    fn policy(setup: &Setup) -> Result<Box<dyn Policy>> {
        Ok(Box::new(of(setup, Dtype::F32)?))
    }
}

/// Returns a policy with products in `dtype`.
fn of(Setup { config, loss, lora, of_values }: &Setup, dtype: Dtype) -> Result<CpuPolicy> {
    let loss = PolicyLoss {
        config: loss.clone().into(),
        backend: Arc::new(CpuBackend::new().with_products(dtype)),
        implementation: Implementation::Fused,
        max_tokens: 8,
    };
    let mut policy = CpuPolicy::new(config, 1, loss)?;
    if let Some(lora) = lora {
        policy = policy.with_lora(lora, 1)?;
    }
    if let Some(of_values) = of_values {
        policy = policy.with_value_head(of_values.clone())?;
    }
    policy.with_products(dtype)
}

grpo_policy::contract_tests!(Cpu);

mod bf16;

grpo_testkit::tiers!();

/// Packed weights and caches are of the weights before an update, and exports need their memory.
#[test]
fn an_update_and_exports_drop_packed_weights_and_caches() {
    let setup = Setup::default();
    let loss = PolicyLoss::cross_entropy(Dtype::F32);
    let mut policy = CpuPolicy::new(&setup.config, 1, loss).unwrap();
    let sequences = grpo_policy::contract::sequences();
    let tokens = grpo_policy::token_batch(&sequences).unwrap();
    let batch = SequenceBatch { routed_experts: &[], sequences: &sequences, tokens };
    policy.accumulate(&[batch], StepLoss::CrossEntropy { tokens: 5 }).unwrap();
    let request = RolloutRequest {
        prompts: &[vec![1, 5, 6]],
        num_generations: 1,
        max_completion_length: 2,
        stop_ids: &[],
        stop: None,
        sampling: grpo_policy::Sampling::Greedy,
        turn: Some(grpo_policy::Turn { streams: &[0], limits: &[2], finished: None }),
        return_sampling_mask: false,
        return_routed_experts: false,
    };
    let is_kept = |policy: &CpuPolicy| policy.prepared.lock().unwrap().is_some();
    let mut sink = Vec::new();
    policy.generate(&request).unwrap();
    assert!(is_kept(&policy));
    assert!(policy.apply(0.1).unwrap().applied);
    assert!(!is_kept(&policy));
    policy.generate(&request).unwrap();
    policy.export(StateGroup::Weights(Weights::Policy), &mut sink).unwrap();
    assert!(!is_kept(&policy));
    policy.generate(&request).unwrap();
    policy.export_model(&mut sink).unwrap();
    assert!(!is_kept(&policy));
}
