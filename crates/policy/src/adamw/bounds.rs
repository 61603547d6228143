//! How large the numbers of a training state can be: what tells before a step of AdamW that nothing in it overflows.

use super::AdamWStep;

/// What no number of a training state exceeds.
///
/// ```
/// use policy::{AdamWBounds, AdamWConfig};
///
/// let clipped = AdamWConfig { max_grad_norm: 1.0, ..Default::default() };
/// let begun = AdamWBounds { weights: 0.5, moments: 0.0 };
/// // Whatever the gradient is, as long as its norm is finite, this step overflows nowhere: nobody has to look.
/// assert!(begun.after(&clipped.step(1, 1e-3)).is_some());
/// // Without clipping an element of the gradient may be anything.
/// assert!(begun.after(&AdamWConfig { max_grad_norm: 0.0, ..clipped }.step(1, 1e-3)).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWBounds {
    /// Largest magnitude of a weight.
    pub weights: f64,
    /// Largest magnitude of a first moment, and of the root of a second one.
    pub moments: f64,
}

impl AdamWBounds {
    /// Far below what f32 and bf16 overflow at, so that no rounding matters.
    const LARGEST: f64 = 1e30;
    /// As far below it when it is squared.
    const LARGEST_MOMENT: f64 = 1e15;
    /// More than what the roundings of a step make of a number.
    const ROUNDING: f64 = 1.0 + 1e-5;

    /// The bounds of a state in which neither a weight nor a moment is larger than this.
    pub fn of_largest(largest: f64) -> Self {
        Self { weights: largest, moments: largest }
    }

    /// The bounds after a step; `None` where they do not tell that weights and moments stay finite, whatever the gradient is, as long as its
    /// norm is finite: without a norm that gradients are clipped to or skipped above, they never do.
    ///
    /// Such a gradient has no element above that norm. Moments are averages of such elements and of their squares,
    /// with decays in [0, 1), and a weight moves by the rate times a first moment over a number that is at least epsilon.
    pub fn after(self, step: &AdamWStep) -> Option<Self> {
        let &AdamWStep { rate, root, epsilon, decay, max_grad_norm, limit, .. } = step;
        let [rate, root, epsilon, decay, max_grad_norm, limit] =
            [rate, root, epsilon, decay, max_grad_norm, limit].map(f64::from);
        // Twice: norms are added up in f32. Not below 1, so that what it is multiplied by is bounded, too.
        let moments = self.moments.max(2.0 * max_grad_norm.min(limit)).max(1.0) * Self::ROUNDING;
        let step = rate.abs() * moments / epsilon.min(1.0);
        let weights = (self.weights * decay.abs().max(1.0) + step) * Self::ROUNDING;
        // NaN is within nothing, but is lost in a maximum.
        let is_known = !self.moments.is_nan()
            && epsilon >= f64::from(f32::MIN_POSITIVE)
            && moments <= Self::LARGEST_MOMENT
            && moments / root <= Self::LARGEST_MOMENT
            && weights <= Self::LARGEST;
        is_known.then_some(Self { weights, moments })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AdamWConfig, CLIP_EPSILON};
    use super::*;
    use proptest::prelude::*;

    const BEGUN: AdamWBounds = AdamWBounds { weights: 300.0, moments: 0.0 };

    fn with(change: impl FnOnce(&mut AdamWConfig)) -> AdamWConfig {
        let mut config = AdamWConfig::default();
        change(&mut config);
        config
    }

    #[test]
    fn bounds_of_a_long_run_tell_enough() {
        for config in [AdamWConfig::default(), with(|c| (c.max_grad_norm, c.skip_grad_norm) = (0.0, Some(10.0)))] {
            let mut bounds = BEGUN;
            for step in 1..=100_000 {
                bounds = bounds.after(&config.step(step, 1e-4)).unwrap();
            }
            assert!(bounds.weights > 1e8 && bounds.moments >= 2.0, "{bounds:?}");
        }
    }

    #[test]
    fn what_bounds_do_not_tell_is_looked_at() {
        let known = |bounds: AdamWBounds, config: &AdamWConfig, rate| bounds.after(&config.step(1, rate)).is_some();
        let plain = AdamWConfig::default();
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
            assert!(!known(AdamWBounds { weights: number, ..BEGUN }, &plain, 1e-3), "weights of {number}");
            assert!(!known(AdamWBounds { moments: number, ..BEGUN }, &plain, 1e-3), "moments of {number}");
        }
    }

    proptest! {
        /// Weights that are moved as the program moves them, one gradient after the other.
        #[test]
        fn no_step_leads_out_of_its_bounds(
            mut weights in prop::collection::vec(-100.0..100.0_f32, 3),
            gradients in prop::collection::vec(prop::collection::vec(prop::num::f32::NORMAL, 3), 1..40),
            (beta1, beta2) in (0.0..0.9999, 0.0..0.9999),
            (rate, decay) in (-8.0..2.0, 0.0..1.0),
            (epsilon, clip) in (-12.0..1.0, -3.0..6.0),
        ) {
            let rate = 10f64.powf(rate);
            let config = AdamWConfig {
                adam_beta1: beta1,
                adam_beta2: beta2,
                adam_epsilon: 10f64.powf(epsilon),
                weight_decay: decay,
                max_grad_norm: 10f64.powf(clip),
                skip_grad_norm: None,
            };
            let (mut first, mut second) = ([0.0_f32; 3], [0.0_f32; 3]);
            let mut bounds = AdamWBounds { weights: 100.0, moments: 0.0 };
            for (step, gradient) in (1..).zip(gradients) {
                let scalars = config.step(step, rate);
                let AdamWStep { beta1: b1, beta2: b2, rate, root, epsilon, decay, max_grad_norm, .. } = scalars;
                let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
                if !norm.is_finite() {
                    continue;
                }
                let Some(after) = bounds.after(&scalars) else { break };
                bounds = after;
                let clip = (max_grad_norm / (norm + CLIP_EPSILON as f32)).min(1.0);
                for i in 0..3 {
                    let g = gradient[i] * clip;
                    first[i] = b1 * first[i] + (1.0 - b1) * g;
                    second[i] = b2 * second[i] + (1.0 - b2) * g * g;
                    weights[i] = weights[i] * decay - rate * first[i] / (second[i].sqrt() / root + epsilon);
                    let of_moments = f64::from(first[i].abs().max(second[i].sqrt()));
                    prop_assert!(of_moments <= bounds.moments && f64::from(weights[i].abs()) <= bounds.weights);
                }
            }
        }
    }
}
