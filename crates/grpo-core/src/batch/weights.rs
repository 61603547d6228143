//! Weights of tokens, which [`crate::aggregate`] computes.

/// Per-token weights of one optimizer step. Masked tokens have weight 0.
///
/// ```
/// use grpo_core::aggregate::token_weights;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// // Two sequences of one and three tokens, as one step that is split afterwards.
/// let step = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 1, 4])?;
/// let weights = token_weights(&LossConfig::bnpo(), &step)?;
/// assert_eq!(weights.policy, [0.25; 4]);
/// let second = step.with_weights(weights)?.select_sequences(1..2)?;
/// assert_eq!(second.weights().map(|weights| weights.policy.len()), Some(3));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TokenWeights {
    /// Weight of the policy term: `[N]`.
    pub policy: Vec<f64>,
    /// Weight of the KL term, including beta: `[N]`.
    pub kl: Vec<f64>,
    /// Weight of the entropy in the bonus, including entropy_coef: `[N]`.
    pub entropy: Vec<f64>,
    /// Weight of the negative log-likelihood, including positive_example_nll_weight: `[N]`.
    pub nll: Vec<f64>,
}

impl TokenWeights {
    /// Creates weights of 0 for `tokens` tokens.
    pub fn zeros(tokens: usize) -> Self {
        let zeros = vec![0.0; tokens];
        Self { policy: zeros.clone(), kl: zeros.clone(), entropy: zeros.clone(), nll: zeros }
    }

    /// Returns the weights of the tokens `rows`.
    pub(crate) fn select(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |list: &[f64]| list[rows.clone()].to_vec();
        Self { policy: cut(&self.policy), kl: cut(&self.kl), entropy: cut(&self.entropy), nll: cut(&self.nll) }
    }
}
