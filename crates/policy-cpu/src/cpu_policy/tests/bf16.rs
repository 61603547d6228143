//! The contract of [`Policy`] and more on [`CpuPolicy`] with bf16 products.

use super::*;
use policy::contract::{batches, sequences};
use policy::export_all;

struct CpuBf16;

impl Fixture for CpuBf16 {
    // Ratios are exactly 1.
    const SCORE_TOLERANCE: f32 = 0.0;
    // Attention rounds differently with a cache. If a result is halfway between two bf16 values, the next product gets another operand.
    const SAMPLER_TOLERANCE: f32 = 0.05;

    fn policy(setup: &Setup) -> Result<Box<dyn Policy>> {
        Ok(Box::new(of(setup, Dtype::Bf16)?))
    }
}

policy::contract_tests!(CpuBf16);

/// Returns scores, the gradients of the GRPO loss, and the weights after an update.
fn step(dtype: Dtype) -> (Vec<f32>, Vec<Vec<f32>>, Vec<f32>) {
    let (mut policy, sequences) = (of(&Setup::default(), dtype).unwrap(), sequences());
    let parts = batches(&mut policy, &sequences, 2);
    let scores = policy.score(Weights::Policy, &parts).unwrap().logp;
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let gradients = policy.gradients().parameters().iter().map(|of| of.data.clone()).collect();
    assert!(policy.apply(1e-2).unwrap().applied);
    let weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    (scores, gradients, weights.into_iter().flat_map(|of| of.data).collect())
}

#[test]
fn bf16_gradients_are_close_to_f32_and_weights_keep_f32_precision() {
    let [(scores, gradients, weights), (scores16, gradients16, weights16)] = [Dtype::F32, Dtype::Bf16].map(step);
    assert_ne!(scores, scores16, "nothing was rounded");
    assert!(scores.iter().zip(&scores16).all(|(a, b)| (a - b).abs() < 0.1), "{scores:?} {scores16:?}");
    assert_close(&gradients, &gradients16);
    for of in [&weights, &weights16] {
        assert!(of.iter().any(|x| x.to_bits() & 0xffff != 0), "weights were rounded");
    }
}

/// Compares gradients of f32 and of bf16 products, which must not be zero, by their norms.
fn assert_close(exact: &[Vec<f32>], rounded: &[Vec<f32>]) {
    let norm = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>().sqrt();
    assert_eq!(exact.len(), rounded.len());
    for (exact, found) in exact.iter().zip(rounded) {
        let differences: Vec<f32> = exact.iter().zip(found).map(|(a, b)| a - b).collect();
        let off = norm(&differences) / norm(exact);
        assert!(norm(exact) > 0.0 && off < 0.1, "{off} of {}", norm(exact));
    }
}

#[test]
fn bf16_gradients_of_adapters_of_experts_are_close_to_f32() {
    let lora = LoraConfig {
        target_modules: models::TargetModules::Names(vec!["q_proj".into()]),
        target_parameters: vec!["experts.gate_up_proj".into(), "experts.down_proj".into()],
        ..LoraConfig::default()
    };
    let config = ModelConfig { experts: Some(models::Experts::default()), ..Setup::default().config };
    let setup = Setup { config, lora: Some(lora), ..Setup::default() };
    let sequences = sequences();
    // After an update, both matrices of every adapter have a gradient.
    let mut trained = of(&setup, Dtype::F32).unwrap();
    let parts = batches(&mut trained, &sequences, 2);
    trained.step(&parts, StepLoss::Grpo, 1e-2).unwrap();
    let weights = export_all(&trained, StateGroup::Weights(Weights::Policy)).unwrap();
    let [exact, rounded] = [Dtype::F32, Dtype::Bf16].map(|dtype| {
        let mut policy = of(&setup, dtype).unwrap();
        policy.import_weights(&weights).unwrap();
        policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        let gradients = policy.gradients().parameters().iter();
        gradients.map(|of| of.data.clone()).collect::<Vec<_>>()
    });
    assert_ne!(exact, rounded, "nothing was rounded");
    assert_close(&exact, &rounded);
}

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
    let sampling = policy::Sampling::Random {
        temperature: 1.0,
        processors: policy::LogitsProcessors::default(),
        seed: 3,
        purpose: rng::Purpose::Rollout,
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
    let setup = Setup { config, ..Setup::default() };
    let mut policy = of(&setup, dtype).unwrap();
    let together = policy.generate(&request).unwrap();
    assert_eq!(policy.with_rollout_batch_size(1).generate(&request).unwrap(), together, "{dtype:?}");
}
