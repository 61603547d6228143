//! How much each token counts; [`crate::aggregate`] says how.

/// Per-token weights of one optimizer step. Masked tokens have weight 0.
///
/// ```
/// use grpo_core::aggregate::token_weights;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// // Two sequences of one token and of three, as one step that is cut afterwards.
/// let step = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 1, 4])?;
/// let weights = token_weights(&LossConfig::bnpo(), &step)?;
/// assert_eq!(weights.policy, [0.25; 4]);
/// let second = step.with_weights(weights)?.select_sequences(1..2)?;
/// assert_eq!(second.weights().map(|weights| weights.policy.len()), Some(3));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TokenWeights {
    /// Of the token's policy term: `[N]`.
    pub policy: Vec<f64>,
    /// Of its KL term, beta included: `[N]`.
    pub kl: Vec<f64>,
    /// Of its entropy in the bonus, entropy_coef included: `[N]`.
    pub entropy: Vec<f64>,
    /// Of its negative log-likelihood, positive_example_nll_weight included: `[N]`.
    pub nll: Vec<f64>,
}

impl TokenWeights {
    /// Weight 0 for `tokens` tokens.
    pub fn zeros(tokens: usize) -> Self {
        let zeros = vec![0.0; tokens];
        Self { policy: zeros.clone(), kl: zeros.clone(), entropy: zeros.clone(), nll: zeros }
    }

    /// The tokens `rows`.
    pub(crate) fn select(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |list: &[f64]| list[rows.clone()].to_vec();
        Self { policy: cut(&self.policy), kl: cut(&self.kl), entropy: cut(&self.entropy), nll: cut(&self.nll) }
    }
}
