//! Factors of a token's terms without derivatives: the sampler's weight and the selection of tokens. Computed by
//! [`crate::LossConfig::prepare`] before the loss.

use crate::metrics::Metrics;

/// Scores of the policy for a batch: `[N]` each, in nats. Masked tokens may hold any finite number.
///
/// ```
/// use grpo_core::batch::PolicyValues;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// // The half of the tokens with the highest entropy keeps its policy term.
/// let config = LossConfig { top_entropy_quantile: 0.5, ..LossConfig::dapo() };
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?;
/// let scored = PolicyValues { logp: vec![-1.0, -2.0], entropy: vec![0.1, 1.5] };
/// let prepared = config.prepare(&batch, |_| Ok::<_, grpo_core::Error>(scored))?;
/// assert_eq!(prepared.factors().map(|factors| factors.policy.clone()), Some(vec![0.0, 1.0]));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyValues {
    /// Log-probabilities.
    pub logp: Vec<f64>,
    /// Entropies.
    pub entropy: Vec<f64>,
}

/// Factors per token `[N]`; the neutral values are 1, 1, 1, 0 and 0.
///
/// ```
/// use grpo_core::TokenBatch;
/// use grpo_core::batch::TokenFactors;
///
/// // The second token's policy term counts half.
/// let factors = TokenFactors { policy: vec![1.0, 0.5], ..TokenFactors::new(2) };
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?.with_factors(factors)?;
/// assert!(batch.factors().is_some());
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenFactors {
    /// Factor of the policy term.
    pub policy: Vec<f64>,
    /// Factor of the weight in the entropy bonus.
    pub entropy: Vec<f64>,
    /// Factor of the token's contribution to the log-ratio of its sequence.
    pub log_ratio_scale: Vec<f64>,
    /// kl_cov: 1 if the token has the penalty, else 0.
    pub kl_cov_mask: Vec<f64>,
    /// Added to the log-ratio of the token's sequence (vespo).
    pub log_ratio_bias: Vec<f64>,
    /// Metrics of the computation, under TRL's names (`sampling/...`).
    pub metrics: Metrics,
}

impl TokenFactors {
    /// Creates neutral factors for `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        Self {
            policy: vec![1.0; tokens],
            entropy: vec![1.0; tokens],
            log_ratio_scale: vec![1.0; tokens],
            kl_cov_mask: vec![0.0; tokens],
            log_ratio_bias: vec![0.0; tokens],
            metrics: Metrics::default(),
        }
    }

    /// Returns the factors of the tokens `rows`, without metrics, which belong to the whole batch.
    pub(crate) fn select(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |list: &[f64]| list[rows.clone()].to_vec();
        Self {
            policy: cut(&self.policy),
            entropy: cut(&self.entropy),
            log_ratio_scale: cut(&self.log_ratio_scale),
            kl_cov_mask: cut(&self.kl_cov_mask),
            log_ratio_bias: cut(&self.log_ratio_bias),
            metrics: Metrics::default(),
        }
    }
}
