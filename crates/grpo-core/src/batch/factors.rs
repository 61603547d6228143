//! What multiplies the terms of a token without a derivative of its own: the sampler's weight, and which tokens were
//! chosen. Made by [`crate::LossConfig::prepare`], before the loss runs.

use crate::metrics::Metrics;

/// What the policy says of a batch, before its loss is known: `[N]` each, in nats. Masked tokens may hold anything finite.
///
/// ```
/// use grpo_core::batch::PolicyValues;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// // Half of the tokens, those of the highest entropy, keep their policy term.
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

/// One entry per token `[N]` in each list; 1, 1, 1, 0 and 0 where nothing is special.
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
    /// Of the policy term.
    pub policy: Vec<f64>,
    /// Of the weight in the entropy bonus.
    pub entropy: Vec<f64>,
    /// Of what the token adds to the log-ratio of its sequence.
    pub log_ratio_scale: Vec<f64>,
    /// kl_cov: 1 where the penalty is paid.
    pub kl_cov_mask: Vec<f64>,
    /// What is added to the log-ratio of the token's sequence (vespo).
    pub log_ratio_bias: Vec<f64>,
    /// What was found on the way, under TRL's names (`sampling/...`).
    pub metrics: Metrics,
}

impl TokenFactors {
    /// Nothing special for `tokens` tokens.
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

    /// The tokens `rows`. What was found stays with the whole.
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
