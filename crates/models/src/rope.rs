//! Rotary frequencies of a decoder.

use crate::config::{ModelConfig, RopeScaling};
use std::f64::consts::TAU;

impl ModelConfig {
    /// Returns the frequency `[D / 2]` of each pair of a head's columns in radians per position: theta^(-2i/D) (arXiv 2104.09864), scaled by
    /// [`ModelConfig::rope_scaling`] if it is set.
    ///
    /// ```
    /// let config = models::ModelConfig { head_dim: Some(4), ..Default::default() };
    /// assert_eq!(config.rope_frequencies(), [1.0, 0.01]);
    /// ```
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let width = self.head_dim();
        let plain = (0..width / 2).map(|i| self.rope_theta.powf(-2.0 * i as f64 / width as f64));
        match self.rope_scaling {
            None => plain.collect(),
            Some(scaling) => plain.map(|frequency| scaling.scaled(frequency)).collect(),
        }
    }
}

impl RopeScaling {
    /// Returns the scaled frequency, as `_compute_llama3_parameters` of transformers does.
    fn scaled(self, frequency: f64) -> f64 {
        let Self { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } = self;
        // The number of rotations of this pair over the original context.
        let turns = original_max_position_embeddings as f64 * frequency / TAU;
        if turns > high_freq_factor {
            frequency
        } else if turns < low_freq_factor {
            frequency / factor
        } else {
            let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            (1.0 - share) * frequency / factor + share * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_stretches_long_wavelengths_only() {
        let scaling = RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let config = ModelConfig { head_dim: Some(16), rope_scaling: Some(scaling), ..ModelConfig::default() };
        // transformers 5.23.0: ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=16, rope_parameters=...), "cpu")[0]
        let expected = [
            1.000000000e+00,
            2.443845868e-01,
            1.304225624e-02,
            3.952847328e-03,
            1.249999972e-03,
            3.952847328e-04,
            1.250000059e-04,
            3.952847328e-05,
        ];
        for (found, expected) in config.rope_frequencies().into_iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        }
    }
}
