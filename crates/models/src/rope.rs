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
