//! The contract of [`Policy`], and the gradient of the value loss, on [`CpuPolicy`].

use super::*;
use burn::tensor::{Tensor, TensorData};
use grpo_core::Implementation;
use policy::contract::{Fixture, Setup, batches, sequences, with_value_targets};
use policy::token_batch;
use std::sync::Arc;

struct Cpu;

impl Fixture for Cpu {
    // The forward pass may round differently with gradients; the loss itself does not.
    const SCORE_TOLERANCE: f32 = 1e-5;

    fn policy(setup: &Setup) -> Result<Box<dyn Policy>> {
        Ok(Box::new(policy(setup)?))
    }
}

policy::contract_tests!(Cpu);

fn policy(Setup { config, loss, lora, of_values }: &Setup) -> Result<CpuPolicy> {
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
    match of_values {
        Some(of_values) => policy.with_value_head(of_values.clone()),
        None => Ok(policy),
    }
}

#[test]
fn the_gradient_of_the_value_loss_matches_plain_burn_through_the_whole_model() {
    let sequences = sequences();
    let config = ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() };
    let without = Setup { config, ..Setup::default() };
    let setup = Setup { of_values: Some(ValueLossConfig::default()), ..without.clone() };
    let mut policy = self::policy(&setup).unwrap();
    let parts = with_value_targets(batches(&mut policy, &sequences, 1));
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    policy.apply(0.05).unwrap();
    // Subtract the gradient of the policy loss from the gradient of both losses.
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let with = std::mem::take(&mut policy.sums);
    let mut without = self::policy(&without).unwrap();
    without.freeze_ref_policy().unwrap();
    without.model = policy.model.clone();
    let bare: Vec<_> = (sequences.chunks(1).zip(&parts))
        .map(|(sequences, part)| SequenceBatch {
            sequences,
            tokens: token_batch(sequences)
                .unwrap()
                .with_advantages(part.tokens.advantages().clone())
                .unwrap()
                .with_old_logp(part.tokens.old_logp().unwrap().to_vec())
                .unwrap()
                .with_ref_logp(part.tokens.ref_logp().unwrap().to_vec())
                .unwrap()
                .with_weights(part.tokens.weights().unwrap().clone())
                .unwrap(),
        })
        .collect();
    without.accumulate(&bare, StepLoss::Grpo).unwrap();

    let mut want = GradientSum::new();
    for part in &parts {
        let targets = part.tokens.value_targets().unwrap();
        let model = policy.model.clone().fork(&policy.model.device());
        let values = model.values(completion_hidden(&model, part.sequences).unwrap()).unwrap();
        let column = |values: &[f32]| {
            Tensor::<2>::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), &model.device())
        };
        let (old, returns) = (column(&targets.old_values), column(&targets.returns));
        let clipped = values.clone().max_pair(old.clone() - 0.2).min_pair(old + 0.2);
        let squares = (values - returns.clone()).powi_scalar(2).max_pair((clipped - returns).powi_scalar(2));
        want.add(&model, (squares.sum() * (0.5 * 0.5 * 0.2)).backward());
    }
    assert!(want.norm() > 0.01, "{}", want.norm());
    for ((with, without), want) in with.parameters().iter().zip(without.sums.parameters()).zip(want.parameters()) {
        let largest = want.data.iter().fold(0f32, |most, g| most.max(g.abs()));
        for ((with, without), want) in with.data.iter().zip(&without.data).zip(&want.data) {
            assert!((with - without - want).abs() <= 1e-5 * largest.max(0.05), "{with} {without} {want}");
        }
    }
    assert!(want.parameters().iter().any(|p| p.name == "embed_tokens" && p.data.iter().any(|g| *g != 0.0)));
}
