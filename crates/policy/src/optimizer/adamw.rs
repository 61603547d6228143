//! AdamW (arXiv 1711.05101), as in PyTorch.

use super::bounds::OptimizerBounds;
use super::code_book::CodeBook;
use super::settings::OptimizerSettings;
use super::update_rule::{Slot, UpdateRule};
use crate::state::MOMENTS;
use grpo_core::backend_api::real::Real;

/// The prefixes of the names of 8-bit codes of first and second moments: whole numbers from 0 to 255 with the shape of the weight.
pub const MOMENT_CODES: [&str; 2] = ["exp_avg_codes.", "exp_avg_sq_codes."];

/// The prefixes of the names of the scales of 8-bit moments, one per block ([`super::MomentBlocks::scales`]).
pub const MOMENT_SCALES: [&str; 2] = ["exp_avg_scales.", "exp_avg_sq_scales."];

/// beta1; beta2; the learning rate divided by the first moment's bias correction; the square root of the second moment's bias correction;
/// epsilon; the factor of weights that decay.
pub(super) const SCALARS: usize = 6;

/// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, w = w decay - rate m / (sqrt(v) / root + epsilon).
pub(super) struct AdamW;

impl UpdateRule<2, SCALARS> for AdamW {
    /// The averages of gradients and of their squares.
    const SLOTS: [Slot; 2] = [
        Slot {
            single: MOMENTS[0],
            eight_bit: [MOMENT_CODES[0], MOMENT_SCALES[0]],
            book: CodeBook::Signed,
            is_squared: false,
        },
        Slot {
            single: MOMENTS[1],
            eight_bit: [MOMENT_CODES[1], MOMENT_SCALES[1]],
            book: CodeBook::Unsigned,
            is_squared: true,
        },
    ];

    fn scalars(config: &OptimizerSettings, step: u64, learning_rate: f64) -> [f64; SCALARS] {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let rate = learning_rate / correction(config.adam_beta1);
        let root = correction(config.adam_beta2).sqrt();
        let decay = 1.0 - learning_rate * config.weight_decay;
        [config.adam_beta1, config.adam_beta2, rate, root, config.adam_epsilon, decay]
    }

    #[inline(always)]
    fn next<R: Real>(scalars: &[R; SCALARS], decays: bool, value: R, g: R, [first, second]: [R; 2]) -> (R, [R; 2]) {
        let [beta1, beta2, rate, root, epsilon, decay] = scalars.clone();
        let one = beta1.constant(1.0);
        let first = beta1.clone() * first + (one.clone() - beta1) * g.clone();
        let second = beta2.clone() * second + (one - beta2) * g.clone() * g;
        let kept = if decays { value * decay } else { value };
        let size = second.sqrt() / root + epsilon;
        (kept - rate * first.clone() / size, [first, second])
    }

    /// Moments are averages of the gradient's elements and of their squares. A weight changes by the rate times a first moment, divided by at
    /// least epsilon. Quantised moments are at most as large as the largest value of their block.
    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        let [_, _, rate, root, epsilon, decay] = *scalars;
        let moments = before.moments.max(gradient) * OptimizerBounds::ROUNDING;
        let weights = before.weights * decay.abs().max(1.0) + rate.abs() * moments / epsilon.min(1.0);
        let is_known = epsilon >= f64::from(f32::MIN_POSITIVE) && moments / root <= OptimizerBounds::LARGEST_MOMENT;
        is_known.then_some(OptimizerBounds { weights, moments })
    }
}
