//! The contract of [`Policy`] and more on [`CpuPolicy`] with bf16 products.

use super::*;
use grpo_policy::contract::{batches, sequences};
use grpo_policy::export_all;

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

grpo_policy::contract_tests!(
    CpuBf16:
    scores_match_the_loss_and_use_the_requested_weights,
    scores_of_a_sampling_mask_are_the_log_probabilities_of_the_sampler,
    a_failed_accumulation_leaves_no_gradient,
    gradients_accumulate_until_an_update,
    a_supervised_step_lowers_its_loss,
    an_update_that_is_not_finite_changes_nothing,
    states_are_restored_bit_for_bit_by_import_and_roll_back,
    a_missing_reference_policy_is_an_error,
    a_value_head_is_trained_with_the_policy_and_saved,
    a_value_head_needs_value_targets_and_vice_versa,
    only_adapters_are_trained_and_the_reference_is_the_model_without_them,
    checkpoints_have_the_tensors_of_transformers_and_peft,
);
// The moments do not depend on the dtype of products.
grpo_policy::contract_tests!(
    #[ignore = "GRPO_TESTS=all"]
    CpuBf16:
    eight_bit_moments_are_restored_bit_for_bit_and_only_with_their_optimizer,
    training_with_eight_bit_moments_is_close_to_f32_moments,
);

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
        target_modules: grpo_models::TargetModules::Names(vec!["q_proj".into()]),
        target_parameters: vec!["experts.gate_up_proj".into(), "experts.down_proj".into()],
        ..LoraConfig::default()
    };
    let config = ModelConfig { experts: Some(grpo_models::Experts::default()), ..Setup::default().config };
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
