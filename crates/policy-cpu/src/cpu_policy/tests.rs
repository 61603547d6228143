//! The contract of [`Policy`] on [`CpuPolicy`].

use super::*;
use grpo_core::Implementation;
use policy::contract::{Fixture, Setup};
use std::sync::Arc;

struct Cpu;

impl Fixture for Cpu {
    // The forward pass may round differently with gradients; the loss itself does not.
    const SCORE_TOLERANCE: f32 = 1e-5;

    fn policy(Setup { config, loss, lora, of_values }: &Setup) -> Result<Box<dyn Policy>> {
        let loss = PolicyLoss {
            config: loss.clone().into(),
            backend: Arc::new(backend_cpu::CpuBackend::new()),
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
        Ok(Box::new(policy))
    }
}

policy::contract_tests!(Cpu);
