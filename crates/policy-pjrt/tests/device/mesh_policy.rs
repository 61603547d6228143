//! A whole policy on meshes of eight virtual devices of XLA's CPU plugin: the contract of [`Policy`], states of other meshes, and errors.

use crate::mesh_models::with_experts;
use crate::mesh_support::{config, eight, loss, on_mesh, policy, rules, sequences};
use crate::support::{runtime, whole};
use grpo_models::{Experts, ModelConfig};
use grpo_policy::contract::{Fixture, Setup};
use grpo_policy::{OptimizerSettings, Policy, PolicyState, StateGroup, StepLoss, Weights, export_all};
use grpo_policy_pjrt::decoder::Axis;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};

struct OnMesh;

impl Fixture for OnMesh {
    const SCORE_TOLERANCE: f32 = 0.0;

    fn policy(Setup { config, loss, lora, of_values }: &Setup) -> grpo_policy::Result<Box<dyn Policy>> {
        // The vocabulary of the contract's model is odd: it is padded.
        let runtime = eight().clone().on_mesh(rules(&[("data", 2), ("fsdp", 2), ("tensor", 2)]))?;
        let mut policy = PjrtPolicy::new(&runtime, config, 1, loss.clone(), PjrtPolicyOptions::default())?;
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
    OnMesh:
    scores_match_the_loss_and_use_the_requested_weights,
    states_are_restored_bit_for_bit_by_import_and_roll_back,
);

mod whole_contract {
    grpo_policy::contract_tests!(
        #[ignore = "GRPO_TESTS=all"]
        super::OnMesh
    );
}

#[test]
fn a_rollout_on_other_devices_than_the_training_is_an_error() {
    for (training, rollout) in
        [(&[("fsdp", 8)][..], [("data", 4)]), (&[("fsdp", 8)], [("data", 1)]), (&[], [("data", 8)])]
    {
        let runtime = if training.is_empty() { runtime().clone() } else { on_mesh(training) };
        let options = PjrtPolicyOptions { rollout_rules: Some(rules(&rollout)), ..PjrtPolicyOptions::default() };
        let error = PjrtPolicy::new(&runtime, &config(), 1, loss(), options).map(|_| ()).unwrap_err().to_string();
        let expected = format!("a mesh of the {} devices", runtime.devices().len());
        assert!(error.contains("rollout_rules") && error.contains(&expected), "{error}");
    }
}

#[test]
fn a_state_is_restored_on_another_mesh_bit_for_bit() {
    let adamw = OptimizerSettings::default();
    let mut first = policy(&on_mesh(&[("fsdp", 8)]), None, PjrtPolicyOptions::default());
    first.freeze_ref_policy().unwrap();
    let all = sequences();
    first.accumulate(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }).unwrap();
    assert!(first.apply(0.02).unwrap().applied);
    let groups = [StateGroup::Weights(Weights::Policy), StateGroup::Weights(Weights::RefPolicy), StateGroup::Optimizer];
    let state = |policy: &PjrtPolicy| groups.map(|group| export_all(policy, group).unwrap());
    let expected = state(&first);
    let [of_policy, of_ref, optimizer] = &expected;
    for runtime in [runtime().clone(), on_mesh(&[("data", 2), ("fsdp", 2), ("tensor", 2)])] {
        let mut second = policy(&runtime, None, PjrtPolicyOptions::default());
        let imported = PolicyState {
            policy: of_policy,
            ref_policy: Some(of_ref),
            optimizer,
            optimizer_steps: 1,
            optimizer_settings: &adamw,
        };
        second.import(&imported).unwrap();
        assert_eq!(state(&second), expected);
    }
}

#[test]
fn a_dimension_that_does_not_divide_is_an_error() {
    let of = |config: &ModelConfig, axes: &[(&str, usize)]| {
        let policy = PjrtPolicy::new(&on_mesh(axes), config, 1, loss(), PjrtPolicyOptions::default());
        policy.map(|_| ()).unwrap_err().to_string()
    };
    let error = of(&config(), &[("tensor", 8)]);
    assert!(error.contains("the query heads"), "{error}");
    let [qwen3_moe, _] = with_experts();
    let experts = Experts { num_experts: 6, num_experts_per_tok: 5, ..qwen3_moe.experts.clone().unwrap() };
    let error = of(&ModelConfig { experts: Some(experts), ..qwen3_moe }, &[("tensor", 4)]);
    assert!(error.contains("mlp.experts.gate_proj") && error.contains("size 6"), "{error}");
    let too_many = on_mesh(&[("fsdp", 8)]).on_mesh(rules(&[("fsdp", 16)])).unwrap_err().to_string();
    assert!(too_many.contains("16 devices") && too_many.contains("has 8"), "{too_many}");
    assert_eq!(on_mesh(&[("fsdp", 4), ("tensor", 2)]).axis_rules().parts(Axis::Embed), 4);
}
