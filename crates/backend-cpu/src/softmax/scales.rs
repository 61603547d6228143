//! The factors of a row: its temperature, and logit_scale if no transform applies it.

use super::transform::Transform;
use grpo_core::{LossConfig, TemperatureFactors};

/// The factors of a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scales {
    /// The factor of logits, before the softmax.
    pub(crate) logit: f32,
    /// The factor of log-probabilities, after the softmax.
    pub(crate) logp: f64,
}

impl Scales {
    /// Returns the factors of a token with `temperature`, or with the temperature of `loss`.
    pub(crate) fn new(loss: &LossConfig, temperature: Option<f32>) -> Self {
        let TemperatureFactors { logits, logp } = loss.temperature_factors(temperature);
        let left = if Transform::new(loss).is_some() { 1.0 } else { loss.logit_scale };
        Self { logit: (left * logits) as f32, logp }
    }
}
