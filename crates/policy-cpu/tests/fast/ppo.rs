//! Two whole PPO updates match torch with verl's functions: advantages and returns, both losses, the value head, and one optimizer for
//! both.

use crate::ppo_of_torch::Ppo;
use grpo_core::Advantages;
use grpo_core::advantages::{AdvantageConfig, AdvantageEstimator, AdvantageInputs, RewardValues};
use policy_cpu::{CpuPolicy, PolicyLoss};
use std::sync::Arc;

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-5, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn advantages_and_returns_match_verl() {
    let ppo = Ppo::open();
    let (batch, old_values) = (ppo.batch(), ppo.tokens("old_values"));
    let gae = AdvantageConfig {
        estimator: AdvantageEstimator::Gae,
        gamma: ppo.settings.number("gamma"),
        lam: ppo.settings.number("lam"),
        ..AdvantageConfig::default()
    };
    let inputs = AdvantageInputs {
        batch: Some(&batch),
        values: Some(&old_values),
        ..AdvantageInputs::new(RewardValues::PerSequence(&ppo.expected.0["rewards"].data), 1)
    };
    let Advantages::PerToken(advantages) = gae.compute(&inputs).unwrap() else { panic!("one per token") };
    assert_near("advantages", &advantages, &ppo.tokens("expected.advantages"));
    assert_near("returns", &gae.value_targets(&inputs).unwrap(), &ppo.tokens("expected.returns"));
}

#[test]
fn two_ppo_updates_match_torch() {
    let ppo = Ppo::open();
    let loss = PolicyLoss {
        config: ppo.loss().into(),
        backend: Arc::new(backend_cpu::CpuBackend::new()),
        implementation: grpo_core::Implementation::Fused,
        max_tokens: 64,
    };
    let policy = CpuPolicy::from_weights(ppo.checkpoint.config(), &ppo.checkpoint.weights, loss).unwrap();
    ppo.check(&mut policy.with_value_head(ppo.of_values()).unwrap());
}
