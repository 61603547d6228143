//! How much each token counts; [`crate::aggregate`] says how.

/// Per-token weights of one optimizer step. Masked tokens have weight 0.
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
