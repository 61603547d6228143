//! The loss of every token of a batch, from scores on the host.

use crate::backend::Scores;
use crate::backend_api::evaluate::Evaluator;
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};

/// The loss of every token of a batch with its derivatives, `[N]` each; 0 at masked tokens.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct TokenLosses {
    /// Weight x token loss, with the KL term and the entropy bonus. The sum is the loss of the batch.
    pub loss: Vec<f64>,
    /// Weight x policy term.
    pub policy: Vec<f64>,
    /// The KL term before its weight; 0 without a reference.
    pub kl: Vec<f64>,
    /// The importance ratio of the token, or of its sequence if its tokens share one.
    pub ratio: Vec<f64>,
    /// Derivative of the loss by the token's log-probability.
    pub dlogp: Vec<f64>,
    /// Derivative of the loss by the token's entropy.
    pub dentropy: Vec<f64>,
}

impl LossConfig {
    /// Computes the loss of every token of `batch` from its scores, such as [`crate::LossOutput::scores`]. No backend is involved. With
    /// weights of 1 ([`TokenBatch::with_weights`]) the results are the terms before their average.
    ///
    /// ```
    /// use grpo_core::{LossConfig, Scores, TokenBatch};
    ///
    /// let batch = TokenBatch::packed(vec![3, 7, 1], vec![0, 2, 3])?
    ///     .with_advantages(vec![1.0, -0.5])?
    ///     .with_old_logp(vec![-0.7, -1.2, -0.1])?;
    /// let scores = Scores { logp: vec![-0.1, -1.2, -0.1], entropy: vec![0.5; 3] };
    /// let losses = LossConfig::dapo().token_losses(&batch, &scores)?;
    /// assert!(losses.ratio[0] > 1.8 && losses.dlogp[0] == 0.0, "the first token is clipped");
    /// assert!((losses.dlogp[1] + 1.0 / 3.0).abs() < 1e-6);
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for scores of another batch; [`Error::NoAdvantages`] for a batch without advantages; the errors of
    /// [`LossConfig::prepare`].
    pub fn token_losses(&self, batch: &TokenBatch, scores: &Scores) -> Result<TokenLosses> {
        if !batch.has_advantages() {
            return Err(Error::NoAdvantages);
        }
        batch.check_scores(scores)?;
        let prepared = self.prepare_tokens(batch, |_| Ok::<_, Error>(scores.clone().into()))?;
        let evaluator = Evaluator::new(self, &prepared)?;
        let rows = prepared.active_rows();
        let active = |values: &[f32]| rows.iter().map(|row| f64::from(values[*row])).collect::<Vec<_>>();
        let zeros = || vec![0.0; batch.tokens()];
        let (loss, policy, kl, ratio, dlogp, dentropy) = (zeros(), zeros(), zeros(), zeros(), zeros(), zeros());
        let mut losses = TokenLosses { loss, policy, kl, ratio, dlogp, dentropy };
        let (logp, entropy) = (active(&scores.logp), active(&scores.entropy));
        evaluator.each_token(0..rows.len(), &logp, &entropy, |token| {
            let row = rows[token.position];
            losses.loss[row] = token.summands.loss;
            losses.policy[row] = token.summands.policy;
            losses.kl[row] = token.summands.kl;
            losses.ratio[row] = token.summands.ratio;
            losses.dlogp[row] = token.dlogp;
            losses.dentropy[row] = -token.columns.entropy_weight;
        });
        Ok(losses)
    }
}
