//! Applied and skipped updates, their learning rates, and the limit on skips.

use super::*;
use grpo_core::Scores;
use policy::{AdamWConfig, Completion, PolicyState, RolloutRequest, StateGroup, TensorSink, TensorSource, Weights};

/// A policy that only has a loss and gradient norms. It applies updates up to its limit.
struct Norms {
    loss: f64,
    norm: f64,
    limit: f64,
    steps: u64,
    rates: Vec<f64>,
}

impl Policy for Norms {
    fn context_length(&self) -> usize {
        64
    }
    fn num_parameters(&self) -> usize {
        0
    }
    fn generate(&mut self, _: &RolloutRequest<'_>) -> policy::Result<Vec<Completion>> {
        unreachable!("nothing is sampled")
    }
    fn score(&mut self, _: Weights, _: &[SequenceBatch<'_>]) -> policy::Result<Scores> {
        unreachable!("nothing is scored")
    }
    fn accumulate(&mut self, _: &[SequenceBatch<'_>], _: StepLoss) -> policy::Result<LossOutput> {
        Ok(LossOutput { loss: self.loss, ..LossOutput::default() })
    }
    fn apply(&mut self, learning_rate: f64) -> policy::Result<UpdateReport> {
        let applied = self.norm <= self.limit;
        self.steps += u64::from(applied);
        self.rates.extend(applied.then_some(learning_rate));
        Ok(UpdateReport { grad_norm: self.norm, applied })
    }
    fn skip(&mut self) -> policy::Result<UpdateReport> {
        Ok(UpdateReport { grad_norm: self.norm, applied: false })
    }
    fn reset_optimizer(&mut self, _: &AdamWConfig) -> policy::Result<()> {
        unreachable!("the phase does not change")
    }
    fn optimizer_steps(&self) -> u64 {
        self.steps
    }
    fn has_ref_policy(&self) -> bool {
        false
    }
    fn freeze_ref_policy(&mut self) -> policy::Result<()> {
        unreachable!("there is no reference policy")
    }
    fn mix_ref_policy(&mut self, _: f64) -> policy::Result<()> {
        unreachable!("there is no reference policy")
    }
    fn begin(&mut self) -> policy::Result<()> {
        unreachable!("updates remember nothing")
    }
    fn commit(&mut self) {}
    fn roll_back(&mut self) -> policy::Result<()> {
        unreachable!("updates remember nothing")
    }
    fn export(&self, _: StateGroup, _: &mut dyn TensorSink) -> policy::Result<()> {
        unreachable!("there are no tensors")
    }
    fn import(&mut self, _: &PolicyState<'_>) -> policy::Result<()> {
        unreachable!("there are no tensors")
    }
    fn import_weights(&mut self, _: &dyn TensorSource) -> policy::Result<()> {
        unreachable!("there are no tensors")
    }
}

const LIMIT: f64 = 2.0;

fn policy() -> Norms {
    Norms { loss: 0.5, norm: 1.0, limit: LIMIT, steps: 0, rates: Vec::new() }
}

fn guarded() -> Updates {
    let config = OptimizerConfig {
        skip_grad_norm: Some(LIMIT),
        max_consecutive_skips: 3,
        warmup_ratio: 0.0,
        ..OptimizerConfig::default()
    };
    Updates::new(&config, 10)
}

fn step(updates: &mut Updates, policy: &mut Norms) -> Result<Update> {
    let check = |sum: &LossOutput| if sum.loss.is_finite() { Ok(()) } else { Err(format!("the loss, {}", sum.loss)) };
    Ok(updates.step(policy, &[], StepLoss::Grpo, check)?.1)
}

#[test]
fn skipped_updates_do_not_advance_the_schedule() {
    for bad in [3.0, f64::NAN, f64::INFINITY] {
        // At the first step, and after an applied one.
        for steps in [0, 1] {
            let (mut policy, mut updates) = (policy(), guarded());
            for _ in 0..steps {
                step(&mut updates, &mut policy).unwrap();
            }
            policy.norm = bad;
            let report = step(&mut updates, &mut policy).unwrap();
            assert!(report.skipped && report.learning_rate == updates.learning_rate_at(steps));
            assert_eq!((policy.steps, updates.skipped_in_a_row()), (steps, 1));
            policy.norm = 1.5;
            assert!(!step(&mut updates, &mut policy).unwrap().skipped, "an update below the limit is applied");
            assert_eq!((policy.steps, updates.skipped_in_a_row()), (steps + 1, 0));
            let rates: Vec<f64> = (0..=steps).map(|step| updates.learning_rate_at(step)).collect();
            assert_eq!(policy.rates, rates);
            assert!(steps == 0 || rates[0] > rates[1], "the schedule falls");
        }
    }
}

#[test]
fn too_many_consecutive_skips_are_an_error() {
    let (mut policy, mut updates) = (policy(), guarded());
    policy.norm = 9.0;
    step(&mut updates, &mut policy).unwrap();
    // A non-finite loss counts as well, whatever the gradient norm is.
    (policy.loss, policy.norm) = (f64::NAN, 1.0);
    let dropped = step(&mut updates, &mut policy).unwrap();
    assert_eq!((dropped.grad_norm, dropped.skipped), (1.0, true));
    (policy.loss, policy.norm) = (0.5, 9.0);
    let error = step(&mut updates, &mut policy).unwrap_err();
    assert!(matches!(error, Error::TooManySkips { skipped: 3, grad_norm: 9.0, limit: LIMIT }), "{error}");
    assert_eq!((policy.steps, updates.skipped_in_a_row()), (0, 2));
    // The count continues after a checkpoint.
    let error = step(&mut guarded().with_skipped_in_a_row(2), &mut policy).unwrap_err();
    assert!(matches!(error, Error::TooManySkips { skipped: 3, .. }), "{error}");
}

#[test]
fn a_non_finite_loss_is_an_error_without_skip_grad_norm() {
    let (mut policy, mut updates) = (policy(), Updates::new(&OptimizerConfig::default(), 10));
    policy.loss = f64::INFINITY;
    let error = step(&mut updates, &mut policy).unwrap_err();
    assert!(error.to_string().contains("the loss, inf"), "{error}");
    assert_eq!((policy.steps, updates.skipped_in_a_row()), (0, 0));
}
