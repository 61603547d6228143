//! Rotary frequencies of a decoder.

use crate::config::{ModelConfig, QueryScaling, RopeScaling, RopeType};
use crate::layer::LayerRope;
use std::f64::consts::TAU;

/// A rotary embedding (arXiv 2104.09864): pair i of the rotated columns of a head is turned by position x `frequencies[i]` radians.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The frequency of each pair in radians per position; the first `2 * frequencies.len()` columns of a head are rotated.
    pub frequencies: Vec<f64>,
    /// The factor of cosines and sines.
    pub attention_factor: f64,
    /// The factor of queries that grows with the position.
    pub query_scaling: Option<QueryScaling>,
}

impl ModelConfig {
    /// Returns the rotary embedding of layers with this one; `None` if they have none.
    ///
    /// ```
    /// use grpo_models::LayerRope;
    ///
    /// let config = grpo_models::ModelConfig { head_dim: Some(4), ..Default::default() };
    /// let rotary = config.rotary(LayerRope::Global).expect("every layer has one");
    /// assert_eq!((rotary.frequencies, rotary.attention_factor), (vec![1.0, 0.01], 1.0));
    /// ```
    pub fn rotary(&self, rope: LayerRope) -> Option<Rotary> {
        let width = self.rotated(self.width_with(rope));
        let plain = |theta: f64| (0..width / 2).map(move |i| theta.powf(-2.0 * i as f64 / width as f64));
        let scaling = match rope {
            LayerRope::None => return None,
            LayerRope::Local => None,
            LayerRope::Global => self.rope_scaling.as_ref(),
        };
        let theta = if rope == LayerRope::Local { self.rope_local_theta } else { None }.unwrap_or(self.rope_theta);
        let Some(scaling) = scaling else {
            return Some(Rotary { frequencies: plain(theta).collect(), attention_factor: 1.0, query_scaling: None });
        };
        Some(Rotary {
            frequencies: scaling.scaled(plain(theta).collect(), theta),
            attention_factor: scaling.attention_factor,
            query_scaling: scaling.query_scaling(),
        })
    }

    /// Returns the number of rotated columns of a head of layers with `rope: global`.
    pub fn rotary_dim(&self) -> usize {
        self.rotated(self.width_with(LayerRope::Global))
    }

    /// Returns the number of rotated columns of a head of this width.
    fn rotated(&self, width: usize) -> usize {
        (width as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns the width of the heads of layers with this rotary embedding.
    fn width_with(&self, rope: LayerRope) -> usize {
        let layer = self.layers.iter().find(|layer| layer.rope == rope);
        self.heads(layer.copied().unwrap_or_default()).width
    }
}

impl RopeScaling {
    /// Returns the scaled frequencies, as `modeling_rope_utils.py` of transformers computes them.
    fn scaled(&self, frequencies: Vec<f64>, theta: f64) -> Vec<f64> {
        match self.rope_type {
            RopeType::Linear => frequencies.into_iter().map(|frequency| frequency / self.factor).collect(),
            RopeType::Proportional => {
                let rotated = (self.partial_rotary_factor * frequencies.len() as f64) as usize;
                let of_pair = |(i, frequency)| if i < rotated { frequency / self.factor } else { 0.0 };
                frequencies.into_iter().enumerate().map(of_pair).collect()
            }
            RopeType::Llama3 => frequencies.into_iter().map(|frequency| self.llama3(frequency)).collect(),
            RopeType::Yarn => self.yarn(frequencies, theta),
            RopeType::Longrope => {
                frequencies.iter().zip(&self.short_factor).map(|(frequency, factor)| frequency / factor).collect()
            }
        }
    }

    fn llama3(&self, frequency: f64) -> f64 {
        let Self { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings, .. } = *self;
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

    /// Pairs with more than `beta_fast` rotations over the original context keep their frequency, pairs with less than `beta_slow` are
    /// stretched by `factor`; between both, the share of the stretched frequency grows linearly with the index of the pair.
    fn yarn(&self, frequencies: Vec<f64>, theta: f64) -> Vec<f64> {
        let width = 2.0 * frequencies.len() as f64;
        // The index of the pair with this many rotations over the original context.
        let index = |turns: f64| {
            width * (self.original_max_position_embeddings as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (low, high) = (index(self.beta_fast), index(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(width - 1.0));
        let high = if high == low { high + 0.001 } else { high };
        let stretched = |(i, frequency): (usize, f64)| {
            let share = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            share * frequency / self.factor + (1.0 - share) * frequency
        };
        frequencies.into_iter().enumerate().map(stretched).collect()
    }

    fn query_scaling(&self) -> Option<QueryScaling> {
        let original = self.original_max_position_embeddings;
        self.llama_4_scaling_beta.map(|beta| QueryScaling { beta, original })
    }
}
