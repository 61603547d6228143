//! The floating-point operations of a model.

use crate::config::ModelConfig;
use crate::parameters::Initial;

/// The tokens of sequences, counted for [`ModelConfig::forward_flops`].
///
/// ```
/// use grpo_models::{ModelConfig, TokenCounts};
///
/// let config = ModelConfig::default();
/// let mut counts = TokenCounts::default();
/// // A prompt of 100 tokens with a completion of 50 tokens, whose logits are computed.
/// counts.add(&config, 0, 100, 0);
/// counts.add(&config, 100, 50, 50);
/// assert!(config.forward_flops(&counts) > 2.0 * 50.0 * (config.vocab_size * config.hidden_size) as f64);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenCounts {
    /// Tokens that pass through the layers.
    tokens: f64,
    /// Columns of queries, A D, of pairs of a token and a token that it attends to, summed over the layers.
    pairs: f64,
    /// Tokens with logits.
    logits: f64,
}

impl TokenCounts {
    /// Adds `count` tokens behind `before` tokens of their sequence, `logits` of them with logits.
    pub fn add(&mut self, config: &ModelConfig, before: usize, count: usize, logits: usize) {
        self.tokens += count as f64;
        self.logits += logits as f64;
        for index in (0..config.num_hidden_layers).filter(|index| config.linear_attention_of(*index).is_none()) {
            let layer = config.layer(index);
            let window = layer.sliding_window.unwrap_or(usize::MAX);
            // The first tokens attend to all before them and to themselves, the others to a whole window.
            let growing = window.saturating_sub(before).min(count);
            let all = (2 * before + growing + 1) as f64 * growing as f64 / 2.0;
            let rest = if growing < count { (count - growing) as f64 * window as f64 } else { 0.0 };
            self.pairs += (all + rest) * config.heads(layer).query_columns() as f64;
        }
    }
}

impl ModelConfig {
    /// Returns the floating-point operations of the matmuls of a forward pass: 2 for each token and each weight that it uses, 4 D for each head
    /// and pair of tokens in attention, 6 Dk Dv for each token and value head of a Gated DeltaNet (two products with the state, and its
    /// update), and 2 H V for each token with logits. A backward pass through trained weights needs twice as many.
    pub fn forward_flops(&self, counts: &TokenCounts) -> f64 {
        let matrices = self.tensors().filter(|(row, _, tensor)| {
            row.role.is_of_layers() && row.initial != Initial::Zeros && tensor.shape.len() >= 2
        });
        // A token uses a part of the experts.
        let share = self.experts.as_ref().map_or(1.0, |of| of.num_experts_per_tok as f64 / of.num_experts as f64);
        let used = matrices.map(|(row, _, p)| p.len() as f64 * if row.role.is_of_experts() { share } else { 1.0 });
        let weights = used.sum::<f64>();
        let states = self.linear_attention.map_or(0, |of| self.linear_attention_layers() * of.state());
        let recurrent = 6.0 * states as f64;
        let head = (self.vocab_size * self.hidden_size) as f64;
        (2.0 * weights + recurrent) * counts.tokens + 4.0 * counts.pairs + 2.0 * head * counts.logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_tokens_are_those_inside_the_window() {
        let plain = ModelConfig { num_hidden_layers: 3, ..ModelConfig::default() };
        let pairs = |config: &ModelConfig, before, count| {
            let mut counts = TokenCounts::default();
            counts.add(config, before, count, 0);
            counts.pairs / (config.num_attention_heads * config.head_dim()) as f64
        };
        assert_eq!(pairs(&plain, 0, 4), 3.0 * 10.0);
        assert_eq!(pairs(&plain, 5, 2), 3.0 * (6.0 + 7.0));
        let sliding = |window| {
            let layers =
                plain.period().into_iter().map(|layer| crate::LayerSpec { sliding_window: Some(window), ..layer });
            ModelConfig { layers: layers.collect(), ..plain.clone() }
        };
        assert_eq!(pairs(&sliding(3), 0, 5), 3.0 * (1.0 + 2.0 + 3.0 + 3.0 + 3.0));
        assert_eq!(pairs(&sliding(3), 7, 2), 3.0 * 6.0);
        assert_eq!(pairs(&sliding(1), 0, 4), 3.0 * 4.0);
    }

    #[test]
    fn tokens_of_a_gated_delta_net_use_its_weights_and_its_state() {
        let sizes = crate::LinearAttention::default();
        let layers = vec![crate::LayerSpec::GATED_DELTA_NET];
        let config = ModelConfig { layers, linear_attention: Some(sizes), ..ModelConfig::default() };
        let of = |before, count| {
            let mut counts = TokenCounts::default();
            counts.add(&config, before, count, 0);
            config.forward_flops(&counts)
        };
        let (l, h, i) = (config.num_hidden_layers, config.hidden_size, config.intermediate_size);
        let (channels, values) = (2 * 2 * 16 + 4 * 16, 4 * 16);
        let weights = l * (h * (channels + values + 2 * 4 + values + 3 * i) + 4 * channels);
        assert_eq!(of(0, 7), 7.0 * (2 * weights + 6 * l * 4 * 16 * 16) as f64);
        // The tokens before a token are in its state.
        assert_eq!(of(1000, 7), of(0, 7));
    }

    #[test]
    fn pairs_count_with_the_heads_of_their_layer() {
        let plain = ModelConfig { num_hidden_layers: 3, ..ModelConfig::default() };
        let wide = crate::LayerSpec { head_dim: Some(32), rope: crate::LayerRope::None, ..Default::default() };
        let mixed = ModelConfig { layers: vec![wide, crate::LayerSpec::default()], ..plain };
        let mut counts = TokenCounts::default();
        counts.add(&mixed, 0, 4, 0);
        assert_eq!(counts.pairs, 10.0 * (4 * (32 + 16 + 32)) as f64);
    }

    #[test]
    fn tokens_use_a_part_of_the_experts() {
        let flops = |num_experts| {
            let experts = crate::Experts { num_experts, num_experts_per_tok: 2, ..crate::Experts::default() };
            let config = ModelConfig { experts: Some(experts), ..ModelConfig::default() };
            let mut counts = TokenCounts::default();
            counts.add(&config, 0, 1, 0);
            (config.forward_flops(&counts), 2.0 * (config.hidden_size * config.num_hidden_layers) as f64)
        };
        // Two more experts have two more rows of the router.
        let ((two, row), (four, _)) = (flops(2), flops(4));
        assert_eq!(four - two, 2.0 * row);
    }

    #[test]
    fn flops_are_those_of_matrices_attention_and_head() {
        let config = ModelConfig::default();
        let of = |length| {
            let mut counts = TokenCounts::default();
            counts.add(&config, 0, length, length);
            config.forward_flops(&counts)
        };
        let ModelConfig { num_hidden_layers: l, hidden_size: h, intermediate_size: i, vocab_size: v, .. } = config;
        let (a, k, d) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim());
        let weights = (l * (h * (a + 2 * k) * d + a * d * h + 3 * h * i)) as f64;
        let (head, attention) = ((h * v) as f64, 4.0 * (l * a * d) as f64);
        for length in [1_usize, 10, 2000] {
            let (n, pairs) = (length as f64, (length * (length + 1) / 2) as f64);
            assert_eq!(of(length), 2.0 * weights * n + attention * pairs + 2.0 * head * n);
        }
    }
}
