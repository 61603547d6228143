//! Stochastic gradient descent with momentum, as in PyTorch: without dampening, and with weight decay as a part of the gradient.

use super::bounds::OptimizerBounds;
use super::settings::OptimizerSettings;
use super::update_rule::{Slot, UpdateRule};
use grpo_core::backend_api::real::Real;

/// The momentum; the learning rate; the weight decay.
pub(super) const SCALARS: usize = 3;

/// b = momentum b + g + weight_decay w, w = w - rate b.
pub(super) struct Sgd;

impl UpdateRule<1, SCALARS> for Sgd {
    /// The sum of gradients.
    const SLOTS: [Slot; 1] = [Slot::MOMENTUM];

    fn scalars(config: &OptimizerSettings, _: u64, learning_rate: f64) -> [f64; SCALARS] {
        [config.momentum.unwrap_or(0.9), learning_rate, config.weight_decay]
    }

    #[inline(always)]
    fn next<R: Real>(scalars: &[R; SCALARS], decays: bool, value: R, g: R, [buffer]: [R; 1]) -> (R, [R; 1]) {
        let [momentum, rate, weight_decay] = scalars.clone();
        let g = if decays { g + weight_decay * value.clone() } else { g };
        let buffer = momentum * buffer + g;
        (value - rate * buffer.clone(), [buffer])
    }

    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        let [momentum, rate, weight_decay] = scalars.map(f64::abs);
        let moments = momentum * before.moments + gradient + weight_decay * before.weights;
        let moments = moments * OptimizerBounds::ROUNDING;
        Some(OptimizerBounds { weights: before.weights + rate * moments, moments })
    }
}
