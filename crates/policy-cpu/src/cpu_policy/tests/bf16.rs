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
    let norm = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>().sqrt();
    for (exact, found) in gradients.iter().zip(&gradients16) {
        let differences: Vec<f32> = exact.iter().zip(found).map(|(a, b)| a - b).collect();
        let off = norm(&differences) / norm(exact);
        assert!(off < 0.1, "{off}");
    }
    assert!(gradients.iter().all(|of| norm(of) > 0.0));
    for of in [&weights, &weights16] {
        assert!(of.iter().any(|x| x.to_bits() & 0xffff != 0), "weights were rounded");
    }
}

#[test]
fn samples_of_a_large_model_are_those_of_every_batch_size() {
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
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let setup = Setup { config: config.clone(), ..Setup::default() };
        let mut policy = of(&setup, dtype).unwrap();
        let together = policy.generate(&request).unwrap();
        assert_eq!(policy.with_rollout_batch_size(1).generate(&request).unwrap(), together, "{dtype:?}");
    }
}
