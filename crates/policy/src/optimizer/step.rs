//! The scalars of a step, and the step of a tensor.

use super::Rule;
use super::bounds::OptimizerBounds;
use super::settings::OptimizerSettings;
use super::update_rule::Matrices;
use grpo_core::backend_api::real::Real;
use grpo_models::OptimizerName;
use std::fmt::Debug;

/// The scalars of one step, which do not differ between elements. [`OptimizerSettings::step`] creates them in f32, the precision of the update.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerStep<R = f32> {
    optimizer: OptimizerName,
    /// The scalars of all rules of the optimizer.
    scalars: Vec<R>,
    /// Gradients with a larger norm are clipped to this norm; infinite if clipping is off.
    pub max_grad_norm: R,
    /// Largest gradient norm that is applied.
    pub limit: R,
}

impl OptimizerSettings {
    /// Returns the scalars of step `step`, counted from 1.
    pub fn step(&self, step: u64, learning_rate: f64) -> OptimizerStep {
        let max_grad_norm = if self.max_grad_norm > 0.0 { self.max_grad_norm } else { f64::INFINITY };
        let scalars = Rule::of_optimizer(self.name).iter().flat_map(|rule| rule.scalars(self, step, learning_rate));
        OptimizerStep {
            optimizer: self.name,
            scalars: scalars.map(|scalar| scalar as f32).collect(),
            max_grad_norm: max_grad_norm as f32,
            // Without a limit, every finite norm passes.
            limit: self.skip_grad_norm.unwrap_or(f64::from(f32::MAX)) as f32,
        }
    }
}

impl OptimizerBounds {
    /// Returns the bounds after a step, or `None` if they do not prove that weights and moments stay finite for every gradient with a
    /// finite norm. Without clipping and without a skip limit, they never prove it.
    ///
    /// Proof: no element of the gradient exceeds the norm to which it is clipped. [`UpdateRule::bounds`](super::UpdateRule::bounds) has the rest.
    pub fn after(self, step: &OptimizerStep) -> Option<Self> {
        let [max_grad_norm, limit] = [step.max_grad_norm, step.limit].map(f64::from);
        // The factor 2 covers the rounding of the norm, which is summed in f32. The lower bound 1 keeps products with this value bounded.
        let gradient = (2.0 * max_grad_norm.min(limit)).max(1.0);
        let Self { weights, moments } = step.bounds(self, gradient)?;
        let weights = weights * Self::ROUNDING;
        // `max` ignores NaN, so the input is checked for it.
        let is_known = !self.moments.is_nan() && moments <= Self::LARGEST_MOMENT && weights <= Self::LARGEST;
        is_known.then_some(Self { weights, moments })
    }
}

impl OptimizerStep {
    /// Returns the scalars as a list: of the rules, then the two of clipping.
    pub fn to_list(&self) -> Vec<f32> {
        self.scalars.iter().copied().chain([self.max_grad_norm, self.limit]).collect()
    }

    /// Returns bounds that hold for every rule.
    fn bounds(&self, before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        let mut after = OptimizerBounds { weights: 0.0, moments: 0.0 };
        for rule in Rule::of_optimizer(self.optimizer) {
            let scalars: Vec<f64> = self.of_rule(*rule).iter().copied().map(f64::from).collect();
            let OptimizerBounds { weights, moments } = rule.bounds(&scalars, before, gradient)?;
            // `max` ignores NaN.
            if weights.is_nan() || moments.is_nan() {
                return None;
            }
            after = OptimizerBounds { weights: after.weights.max(weights), moments: after.moments.max(moments) };
        }
        Some(after)
    }

    /// Updates the elements of a tensor that has the rule of elements: `values` and the beginnings of `slots` in place, with the gradient times
    /// `clip`.
    ///
    /// # Panics
    /// Panics unless there is a slice for each slot of the rule, at least as long as `values`.
    pub fn update(&self, decays: bool, clip: f32, values: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        let rule = Rule::of_elements(self.optimizer);
        rule.update(self.of_rule(rule), decays, clip, values, gradient, slots);
    }

    /// Updates the matrices `[rows, columns]` of a stack: `values` and the `buffer` in place, with the gradient times `clip`. `matrices` creates a
    /// stack of matrices, and `elements` returns the elements of one.
    ///
    /// # Panics
    /// Panics unless the optimizer has a rule of matrices.
    pub fn update_matrices<M: Matrices>(
        &self,
        clip: f32,
        values: &mut [f32],
        gradient: &[f32],
        buffer: &mut [f32],
        matrices: impl Fn(Vec<f32>) -> M,
        elements: impl Fn(M) -> Vec<f32>,
    ) {
        let (rule, scalars) = self.of_matrices();
        let direction = |(buffer, gradient): (&mut f32, &f32)| {
            let (direction, after) = rule.direction(scalars, gradient * clip, *buffer);
            *buffer = after;
            direction
        };
        let directions = matrices(buffer.iter_mut().zip(gradient).map(direction).collect());
        let dims = directions.dims();
        let directions = elements(rule.transformed(&directions));
        for (value, direction) in values.iter_mut().zip(directions) {
            *value = rule.next_of_matrix(scalars, dims, *value, direction);
        }
    }
}

impl<R> OptimizerStep<R> {
    /// Returns the scalars of a rule of the optimizer.
    fn of_rule(&self, rule: Rule) -> &[R] {
        let before = Rule::of_optimizer(self.optimizer).iter().take_while(|other| **other != rule);
        &self.scalars[before.map(|other| other.count()).sum()..][..rule.count()]
    }

    fn of_matrices(&self) -> (Rule, &[R]) {
        let rule = Rule::of_matrices(self.optimizer).expect("an optimizer with a rule of matrices");
        (rule, self.of_rule(rule))
    }
}

impl<R: Real + Debug> OptimizerStep<R> {
    /// Returns matrices and their buffer after the step, given the clipped gradient.
    ///
    /// # Panics
    /// Panics unless the optimizer has a rule of matrices.
    pub fn next_matrices(&self, value: R, gradient: R, buffer: R) -> (R, R)
    where
        R: Matrices,
    {
        let (rule, scalars) = self.of_matrices();
        let (directions, buffer) = rule.direction(scalars, gradient, buffer);
        let dims = directions.dims();
        (rule.next_of_matrix(scalars, dims, value, rule.transformed(&directions)), buffer)
    }

    /// Returns the length of [`OptimizerStep::to_list`].
    pub fn count(optimizer: OptimizerName) -> usize {
        Rule::of_optimizer(optimizer).iter().map(|rule| rule.count()).sum::<usize>() + 2
    }

    /// Returns the scalars of a list.
    ///
    /// # Panics
    /// Panics unless the list has [`OptimizerStep::count`] elements.
    pub fn of_list(optimizer: OptimizerName, numbers: Vec<R>) -> Self {
        assert_eq!(numbers.len(), Self::count(optimizer), "as many scalars as the optimizer has");
        let mut scalars = numbers;
        let [max_grad_norm, limit] = scalars.split_off(scalars.len() - 2).try_into().expect("two scalars of clipping");
        Self { optimizer, scalars, max_grad_norm, limit }
    }

    /// Returns value and slots after the step of the rule of elements, given the clipped gradient.
    ///
    /// # Panics
    /// Panics unless there is a value for each slot of the rule.
    pub fn next(&self, decays: bool, value: R, gradient: R, slots: Vec<R>) -> (R, Vec<R>) {
        let rule = Rule::of_elements(self.optimizer);
        rule.next(self.of_rule(rule), decays, value, gradient, slots)
    }
}

#[cfg(test)]
mod tests {
    use super::super::CLIP_EPSILON;
    use super::*;
    use proptest::prelude::*;

    const BEGUN: OptimizerBounds = OptimizerBounds { weights: 300.0, moments: 0.0 };

    fn with(change: impl FnOnce(&mut OptimizerSettings)) -> OptimizerSettings {
        let mut config = OptimizerSettings::default();
        change(&mut config);
        config
    }

    #[test]
    fn bounds_stay_valid_over_100000_steps() {
        for config in [OptimizerSettings::default(), with(|c| (c.max_grad_norm, c.skip_grad_norm) = (0.0, Some(10.0)))]
        {
            let mut bounds = BEGUN;
            for step in 1..=100_000 {
                bounds = bounds.after(&config.step(step, 1e-4)).unwrap();
            }
            assert!(bounds.weights > 1e8 && bounds.moments >= 2.0, "{bounds:?}");
        }
    }

    #[test]
    fn no_bounds_without_clipping_or_with_extreme_settings() {
        let known =
            |bounds: OptimizerBounds, config: &OptimizerSettings, rate| bounds.after(&config.step(1, rate)).is_some();
        let plain = OptimizerSettings::default();
        assert!(known(BEGUN, &plain, 1.0) && known(BEGUN, &plain, -1.0));
        for rate in [f64::NAN, f64::INFINITY, -1e38, 1e38, 1e22] {
            assert!(!known(BEGUN, &plain, rate), "{rate}");
        }
        for (name, config) in [
            ("no clipping", with(|c| c.max_grad_norm = 0.0)),
            ("clipped far away", with(|c| c.max_grad_norm = 1e16)),
            ("an epsilon that f32 does not have", with(|c| c.adam_epsilon = 1e-50)),
            ("a subnormal epsilon", with(|c| c.adam_epsilon = 1e-40)),
            ("a bias correction of 0", with(|c| c.adam_beta2 = 1.0)),
            ("a decay that overflows", with(|c| c.weight_decay = 1e38)),
        ] {
            assert!(!known(BEGUN, &config, 1.0), "{name}");
        }
        for number in [f64::NAN, f64::INFINITY, 3e38] {
            assert!(!known(OptimizerBounds { weights: number, ..BEGUN }, &plain, 1e-3), "weights of {number}");
            assert!(!known(OptimizerBounds { moments: number, ..BEGUN }, &plain, 1e-3), "moments of {number}");
        }
    }

    proptest! {
        /// Simulates the update for a sequence of gradients.
        #[test]
        fn no_step_exceeds_its_bounds(
            mut weights in prop::collection::vec(-100.0..100.0_f32, 3),
            gradients in prop::collection::vec(prop::collection::vec(prop::num::f32::NORMAL, 3), 1..40),
            (beta1, beta2) in (0.0..0.9999, 0.0..0.9999),
            (rate, decay) in (-8.0..2.0, 0.0..1.0),
            (epsilon, clip) in (-12.0..1.0, -3.0..6.0),
            name in prop::sample::select(OptimizerName::ALL.to_vec()),
        ) {
            let rate = 10f64.powf(rate);
            let config = OptimizerSettings {
                name,
                momentum: Some(beta1),
                adam_beta1: beta1,
                adam_beta2: beta2,
                adam_epsilon: 10f64.powf(epsilon),
                weight_decay: decay,
                max_grad_norm: 10f64.powf(clip),
                ..OptimizerSettings::default()
            };
            let rule = Rule::of_elements(name);
            let mut slots = vec![[0.0_f32; 3]; rule.slots().len()];
            let mut bounds = OptimizerBounds { weights: 100.0, moments: 0.0 };
            for (step, gradient) in (1..).zip(gradients) {
                let scalars = config.step(step, rate);
                let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
                if !norm.is_finite() {
                    continue;
                }
                let Some(after) = bounds.after(&scalars) else { break };
                bounds = after;
                let clip = (scalars.max_grad_norm / (norm + CLIP_EPSILON as f32)).min(1.0);
                let mut slices: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
                scalars.update(true, clip, &mut weights, &gradient, &mut slices);
                for (slot, values) in rule.slots().iter().zip(&slots) {
                    let size = |value: &f32| f64::from(if slot.is_squared { value.sqrt() } else { value.abs() });
                    prop_assert!(values.iter().all(|value| size(value) <= bounds.moments));
                }
                prop_assert!(weights.iter().all(|weight| f64::from(weight.abs()) <= bounds.weights));
            }
        }
    }
}
