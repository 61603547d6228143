//! The use of experts by the routers of a mixture of experts, as metrics of a step.

use crate::error::{Error, Result};
use grpo_core::Metrics;
use grpo_models::ModelConfig;

/// Checks the factor of the load balancing loss.
///
/// # Errors
/// [`Error::Argument`] if `coef` is not a finite number from 0, or above 0 for a model without experts.
pub fn check_router_aux_loss(config: &ModelConfig, coef: f64) -> Result<()> {
    if !(coef.is_finite() && coef >= 0.0) {
        return Err(Error::argument("router_aux_loss_coef", "a finite number from 0", coef));
    }
    if coef > 0.0 && config.experts.is_none() {
        return Err(Error::argument("router_aux_loss_coef", "0, or a model with a mixture of experts", coef));
    }
    if coef > 0.0 && config.experts.as_ref().is_some_and(|experts| experts.sigmoid.is_some()) {
        return Err(Error::argument(
            "router_aux_loss_coef",
            "0 with sigmoid routers, which have no load balancing loss",
            coef,
        ));
    }
    Ok(())
}

/// The tokens of each expert in the micro-batches of a step, and their load balancing loss.
///
/// Prompt and completion tokens count, padding does not. The last token of a sequence predicts nothing, has no forward pass and does not
/// count.
///
/// ```
/// use grpo_core::Metrics;
/// use grpo_policy::RouterStatistics;
///
/// // One layer: three tokens with two of four experts each.
/// let mut step = RouterStatistics::new(4, vec![3.0, 2.0, 1.0, 0.0]);
/// step.merge(RouterStatistics::new(4, vec![1.0, 2.0, 3.0, 0.0]));
/// let mut metrics = Metrics::default();
/// step.record(&mut metrics);
/// assert_eq!(metrics.value("moe/load_max").map(|load| (3.0 * load).round()), Some(4.0));
/// assert_eq!(metrics.value("moe/load_min"), Some(0.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterStatistics {
    experts: usize,
    /// The number of tokens of each expert in each layer, `[L, E]`.
    tokens: Vec<f64>,
    /// The sum of the load balancing losses of micro-batches, and the number of micro-batches.
    aux_loss: Option<(f64, f64)>,
    /// The number of pairs of token and layer with recorded experts, and of those in which the router chooses others.
    replayed: [f64; 2],
    /// The number of tokens with recorded experts, and of those for which the router of a layer chooses others.
    replayed_tokens: [f64; 2],
}

impl RouterStatistics {
    /// Creates the statistics of a micro-batch from the number of tokens of each of `experts` experts in each layer, `[L, E]`.
    pub fn new(experts: usize, tokens: Vec<f64>) -> Self {
        Self { experts, tokens, ..Self::default() }
    }

    /// Adds the load balancing loss of the micro-batch.
    #[must_use]
    pub fn with_aux_loss(self, aux_loss: f64) -> Self {
        Self { aux_loss: Some((aux_loss, 1.0)), ..self }
    }

    /// Adds the replayed routing: the number of pairs of token and layer with recorded experts, and of those in which the router chooses
    /// others; and the number of tokens with recorded experts, and of those for which the router of a layer chooses others.
    #[must_use]
    pub fn with_replay(self, replayed: [f64; 2], replayed_tokens: [f64; 2]) -> Self {
        Self { replayed, replayed_tokens, ..self }
    }

    /// Adds the next micro-batch.
    pub fn merge(&mut self, next: Self) {
        if self.tokens.is_empty() {
            *self = next;
            return;
        }
        self.tokens.iter_mut().zip(next.tokens).for_each(|(sum, tokens)| *sum += tokens);
        for i in 0..2 {
            self.replayed[i] += next.replayed[i];
            self.replayed_tokens[i] += next.replayed_tokens[i];
        }
        if let (Some((sum, count)), Some((loss, more))) = (&mut self.aux_loss, next.aux_loss) {
            (*sum, *count) = (*sum + loss, *count + more);
        }
    }

    /// Records the load of an expert, its share of a layer's tokens over 1/E: the largest and the smallest of all layers as `moe/load_max`
    /// and `moe/load_min`; the mean over layers of the largest load minus 1 as `moe/max_vio` (arXiv 2408.15664), and of the entropy of the
    /// shares over ln E as `moe/load_entropy`. The mean load balancing loss of micro-batches is `aux_loss`, TRL's name. `moe/routing_mismatch` is
    /// the share of the pairs of token and layer with recorded experts in which the router chooses others, and `moe/routing_mismatch_tokens` the
    /// share of tokens for which the router of a layer does.
    pub fn record(&self, metrics: &mut Metrics) {
        let experts = self.experts as f64;
        for layer in self.tokens.chunks_exact(self.experts.max(1)) {
            let sum: f64 = layer.iter().sum();
            let loads = || layer.iter().map(|tokens| tokens * experts / sum);
            let (most, least) = (loads().fold(0.0, f64::max), loads().fold(f64::INFINITY, f64::min));
            metrics.max("moe/load_max", most);
            metrics.min("moe/load_min", least);
            metrics.mean("moe/max_vio", most - 1.0, 1.0);
            if self.experts > 1 {
                let shares = layer.iter().map(|tokens| tokens / sum).filter(|share| *share > 0.0);
                let entropy: f64 = shares.map(|share| -share * share.ln()).sum();
                metrics.mean("moe/load_entropy", entropy / experts.ln(), 1.0);
            }
        }
        if let Some((sum, count)) = self.aux_loss {
            metrics.mean("aux_loss", sum, count);
        }
        for (name, [all, others]) in
            [("moe/routing_mismatch", self.replayed), ("moe/routing_mismatch_tokens", self.replayed_tokens)]
        {
            if all > 0.0 {
                metrics.mean(name, others, all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(experts: usize, tokens: &[f64]) -> Vec<(String, f64)> {
        let mut metrics = Metrics::default();
        RouterStatistics::new(experts, tokens.to_vec()).record(&mut metrics);
        metrics.values().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn named(entropy: f64, load_max: f64, load_min: f64, max_vio: f64) -> Vec<(String, f64)> {
        let all = [("load_entropy", entropy), ("load_max", load_max), ("load_min", load_min), ("max_vio", max_vio)];
        all.map(|(name, value)| (format!("moe/{name}"), value)).to_vec()
    }

    #[test]
    fn loads_are_relative_to_balance() {
        assert_eq!(metrics(4, &[5.0; 4]), named(1.0, 1.0, 1.0, 0.0));
        // All tokens go to one expert.
        assert_eq!(metrics(4, &[0.0, 9.0, 0.0, 0.0]), named(0.0, 4.0, 0.0, 3.0));
        // Two layers: extremes are over all layers, the others are means.
        assert_eq!(metrics(2, &[3.0, 3.0, 6.0, 0.0]), named(0.5, 2.0, 0.0, 0.5));
    }

    #[test]
    fn one_expert_is_balanced_and_has_no_entropy() {
        assert_eq!(metrics(1, &[7.0]), named(1.0, 1.0, 1.0, 0.0)[1..]);
        assert_eq!(metrics(0, &[]), []);
    }

    #[test]
    fn mismatches_are_shares_of_all_micro_batches() {
        let mut step = RouterStatistics::default();
        for (replayed, of_tokens) in [([8.0, 1.0], [4.0, 1.0]), ([4.0, 2.0], [2.0, 2.0])] {
            step.merge(RouterStatistics::new(2, vec![6.0, 2.0]).with_replay(replayed, of_tokens));
        }
        let mut metrics = Metrics::default();
        step.record(&mut metrics);
        assert_eq!(metrics.value("moe/routing_mismatch"), Some(0.25));
        assert_eq!(metrics.value("moe/routing_mismatch_tokens"), Some(0.5));
    }

    #[test]
    fn aux_losses_are_averaged_over_micro_batches() {
        let mut step = RouterStatistics::default();
        for (tokens, loss) in [(1.0, 2.0), (3.0, 5.0)] {
            step.merge(RouterStatistics::new(2, vec![tokens, 2.0]).with_aux_loss(loss));
        }
        let mut metrics = Metrics::default();
        step.record(&mut metrics);
        assert_eq!((metrics.value("aux_loss"), metrics.value("moe/load_max")), (Some(3.5), Some(1.0)));
    }
}
