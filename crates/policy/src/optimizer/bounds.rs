//! Upper bounds on weights and moments: they show, before an optimizer step runs, that the step cannot overflow.

use super::OptimizerStep;

/// Upper bounds on the magnitudes of a training state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerBounds {
    /// Largest magnitude of a weight.
    pub weights: f64,
    /// Largest magnitude of a first moment, and of the root of a second one.
    pub moments: f64,
}

impl OptimizerBounds {
    /// Bound on weights: far below the overflow of f32 and bf16, so rounding does not matter.
    const LARGEST: f64 = 1e30;
    /// Bound on first moments; their squares are then as far from overflow.
    pub(super) const LARGEST_MOMENT: f64 = 1e15;
    /// More than the relative rounding error of one step.
    pub(super) const ROUNDING: f64 = 1.0 + 1e-5;

    /// Returns bounds for a state whose weights and moments are at most `largest` in magnitude.
    pub fn of_largest(largest: f64) -> Self {
        Self { weights: largest, moments: largest }
    }

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

#[cfg(test)]
mod tests {
    use super::super::{CLIP_EPSILON, OptimizerName, OptimizerSettings, Rule};
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
            name in prop::sample::select(vec![OptimizerName::AdamW, OptimizerName::Sgd]),
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
