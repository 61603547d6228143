//! Updates of the reference policy (TR-DPO).

use policy::{Policy, Result};
use run_config::GrpoConfig;

/// Every `ref_model_sync_steps` optimizer steps, moves the reference policy towards the policy: ref = alpha x policy + (1 - alpha) x ref.
/// TR-DPO, arXiv 2404.09656; TRL's SyncRefModelCallback, which counts optimizer steps from 1. Does nothing without a reference
/// policy.
///
/// # Errors
/// The errors of [`Policy::mix_ref_policy`].
pub(crate) fn follow(policy: &mut dyn Policy, optimizer_steps: u64, config: &GrpoConfig) -> Result<()> {
    let due = config.sync_ref_model && optimizer_steps.is_multiple_of(config.ref_model_sync_steps);
    if due && policy.has_ref_policy() { policy.mix_ref_policy(config.ref_model_mixup_alpha) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factory::Parts;
    use models::NamedTensor;
    use policy::{AdamWConfig, PolicyState, StateGroup, TensorSource, Weights, export_all};
    use run_config::TrainConfig;

    /// Returns a policy with every weight set to `policy`, and a reference policy with every weight set to `ref_policy`.
    fn filled(policy: f32, ref_policy: Option<f32>) -> Box<dyn Policy> {
        let mut filled = Parts::from_config(&TrainConfig::built_in()).unwrap().policy;
        let of = |value: f32| {
            let mut weights = export_all(&*filled, StateGroup::Weights(Weights::Policy)).unwrap();
            weights.iter_mut().for_each(|tensor| tensor.data.fill(value));
            weights
        };
        let (policy, ref_policy) = (of(policy), ref_policy.map(of));
        let adamw = AdamWConfig::default();
        let state = PolicyState {
            policy: &policy,
            ref_policy: ref_policy.as_ref().map(|weights| weights as &dyn TensorSource),
            optimizer: &[],
            optimizer_steps: 0,
            adamw: &adamw,
        };
        filled.import(&state).unwrap();
        filled
    }

    fn ref_weights(policy: &dyn Policy) -> Vec<NamedTensor> {
        export_all(policy, StateGroup::Weights(Weights::RefPolicy)).unwrap()
    }

    #[test]
    fn the_reference_is_mixed_every_ref_model_sync_steps() {
        let config = GrpoConfig {
            sync_ref_model: true,
            ref_model_mixup_alpha: 0.75,
            ref_model_sync_steps: 3,
            ..Default::default()
        };
        let mut policy = filled(2.0, Some(-2.0));
        let mut seen = Vec::new();
        for step in 1..=6 {
            follow(&mut *policy, step, &config).unwrap();
            let weights = ref_weights(&*policy);
            let first = weights[0].data[0];
            assert!(weights.iter().all(|tensor| tensor.data.iter().all(|w| *w == first)));
            seen.push(first);
        }
        // 0.75 x 2 - 0.25 x 2 = 1, then 0.75 x 2 + 0.25 x 1 = 1.75.
        assert_eq!(seen, [-2.0, -2.0, 1.0, 1.0, 1.0, 1.75]);
    }

    #[test]
    fn the_reference_stays_unless_sync_is_enabled() {
        let off = GrpoConfig { ref_model_sync_steps: 1, ..GrpoConfig::default() };
        let mut policy = filled(2.0, Some(-2.0));
        follow(&mut *policy, 1, &off).unwrap();
        assert_eq!(ref_weights(&*policy), ref_weights(&*filled(0.0, Some(-2.0))));
        let mut none = filled(2.0, None);
        follow(&mut *none, 1, &GrpoConfig { sync_ref_model: true, ..off }).unwrap();
        assert!(!none.has_ref_policy() && ref_weights(&*none).is_empty());
    }
}
