//! The contract of [`Policy`] on a device, and the accuracy of bf16 products.

use crate::support::{BF16, gradients, narrow, runtime, whole};
use grpo_policy::contract::{Fixture, Setup, batches, sequences};
use grpo_policy::{Error, Policy, StepLoss};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use grpo_testkit::margin::assert_below_without_margin;

struct OnDevice;

impl Fixture for OnDevice {
    // Scores equal those of the loss bit for bit: the ratio is exactly 1 on policy.
    const SCORE_TOLERANCE: f32 = 0.0;

    fn policy(Setup { config, loss, lora, of_values }: &Setup) -> grpo_policy::Result<Box<dyn Policy>> {
        let mut policy = PjrtPolicy::new(runtime(), config, 1, loss.clone(), PjrtPolicyOptions::default())?;
        if let Some(lora) = lora {
            policy = policy.with_lora(lora, 1)?;
        }
        Ok(match of_values {
            Some(of_values) => Box::new(policy.with_value_head(of_values.clone())?),
            None => Box::new(policy),
        })
    }
}

grpo_policy::contract_tests!(
    OnDevice:
    scores_match_the_loss_and_use_the_requested_weights,
    scores_of_a_sampling_mask_are_the_log_probabilities_of_the_sampler,
    a_failed_accumulation_leaves_no_gradient,
    gradients_accumulate_until_an_update,
    a_supervised_step_lowers_its_loss,
    an_update_that_is_not_finite_changes_nothing,
    states_are_restored_bit_for_bit_by_import_and_roll_back,
    a_missing_reference_policy_is_an_error,
    a_value_head_needs_value_targets_and_vice_versa,
    checkpoints_have_the_tensors_of_transformers_and_peft,
);

mod whole_contract {
    grpo_policy::contract_tests!(
        #[ignore = "GRPO_TESTS=all"]
        super::OnDevice
    );
}

/// Creates the default policy of the contract.
fn fresh(options: PjrtPolicyOptions) -> PjrtPolicy {
    let Setup { config, loss, .. } = Setup::default();
    PjrtPolicy::new(runtime(), &config, 1, loss, options).unwrap()
}

#[test]
fn a_micro_batch_with_another_number_of_tokens_is_an_error() {
    let (mut policy, sequences) = (fresh(PjrtPolicyOptions::default()), sequences());
    let mut one = batches(&mut policy, &sequences, 1).swap_remove(0);
    one.sequences = &sequences[1..];
    let error = policy.accumulate(&[one], StepLoss::Grpo).unwrap_err();
    assert!(matches!(error, Error::Argument { operation: "a micro-batch", .. }), "{error}");
}

#[test]
fn bf16_products_have_nearly_the_same_gradients() {
    let sequences = sequences();
    let [exact, rounded] = [PjrtPolicyOptions::default(), narrow()].map(|options| {
        let mut policy = fresh(options);
        let loss = policy.accumulate(&[whole(&sequences)], StepLoss::CrossEntropy { tokens: 5 }).unwrap().loss;
        (loss, gradients(&mut policy))
    });
    assert_ne!(exact.0, rounded.0);
    assert_below_without_margin("loss in bf16", (exact.0 - rounded.0).abs() / exact.0, 0.02, BF16);
    for (name, exact) in &exact.1 {
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let size = norm(&mut exact.data.iter().copied());
        let off = norm(&mut exact.data.iter().zip(&rounded.1[name].data).map(|(a, b)| a - b));
        assert_below_without_margin(&format!("{name} in bf16"), off / size, 0.1, BF16);
    }
}
