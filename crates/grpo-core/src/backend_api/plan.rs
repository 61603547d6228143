//! One step of the loss, independent of the head that computes logits.
//!
//! 1. Prepare the batch ([`LossConfig::prepare`]: masks, the sampler's weight, selected tokens).
//! 2. Score the tokens that the configuration excludes from the loss.
//! 3. The head computes log-probabilities and takes their derivatives.
//! 4. Compute metrics from the sums.
//!
//! [`step`] runs these steps around any [`Head`]: kernels on the host, the oracle in f64, programs on a device.

use crate::backend::{LossOutput, Scores};
use crate::backend_api::evaluate::Evaluator;
use crate::backend_api::token_columns::LossSums;
use crate::batch::PolicyValues;
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::metrics::Metrics;

/// The computation of logits: yields log-probabilities and entropies, takes dL/dlogp and dL/dentropy. It does not depend on clipping, KL or
/// advantages. Its callers have checked the tensors and the batch ([`PlanRequest::check_call`](crate::PlanRequest::check_call)).
pub trait Head {
    /// The policy's output in one call, with the destination of its gradients: accumulators, or the logits themselves.
    type Tensors<'a>;
    /// Log-probability and entropy of every token; 0 at masked tokens.
    type Scores: TokenScores;
    /// The error of a call.
    type Error: From<Error>;

    /// Computes the scores of the active tokens of `batch`, without gradients.
    ///
    /// # Errors
    /// The errors of the backend.
    fn score(&mut self, tensors: &Self::Tensors<'_>, batch: &TokenBatch) -> Result<Self::Scores, Self::Error>;

    /// Computes the loss of [`Evaluator::batch`] and its gradients: adds them to accumulators, or replaces logits by them, with 0 at masked
    /// tokens. Returns the sums and the scores, whose log-probabilities equal the result of [`Head::score`] bit for bit.
    ///
    /// # Errors
    /// The errors of the backend; tensors on the host are unchanged after an error.
    fn gradient(
        &mut self,
        tensors: Self::Tensors<'_>,
        loss: &Evaluator<'_>,
    ) -> Result<(LossSums<f64>, Self::Scores), Self::Error>;
}

/// Log-probabilities and entropies of a batch.
pub trait TokenScores: Sized {
    /// `true` if [`step`] also scores the tokens that the configuration excludes from the loss.
    const FILLED: bool = true;

    /// Copies the scores to the host, in f64.
    ///
    /// # Errors
    /// The errors of their device.
    fn to_values(&self) -> Result<PolicyValues>;

    /// Copies the scores of `other` at the active rows of `batch`.
    fn fill(&mut self, batch: &TokenBatch, other: &Self);
}

impl TokenScores for Scores {
    fn to_values(&self) -> Result<PolicyValues> {
        Ok(self.clone().into())
    }

    fn fill(&mut self, batch: &TokenBatch, other: &Self) {
        for row in batch.active_rows() {
            (self.logp[*row], self.entropy[*row]) = (other.logp[*row], other.entropy[*row]);
        }
    }
}

/// The result of [`step`].
#[derive(Clone, Debug)]
pub struct Step<S> {
    /// Sums over the active tokens.
    pub sums: LossSums<f64>,
    /// Metrics computed from the sums, under TRL's names.
    pub metrics: Metrics,
    /// Scores of the active tokens; if [`TokenScores::FILLED`], also of the tokens that the configuration excludes from the loss.
    pub scores: S,
}

impl From<Step<Scores>> for LossOutput {
    fn from(Step { sums, metrics, scores }: Step<Scores>) -> Self {
        Self::new(sums.loss, sums.policy, scores, metrics)
    }
}

/// Evaluates `config` on `batch` with `head`, which computes the policy of `tensors`.
///
/// # Errors
/// [`Error::NoAdvantages`] for a batch without advantages; the errors of [`LossConfig::prepare`], [`Evaluator::new`] and `head`.
pub fn step<H: Head>(
    config: &LossConfig,
    batch: &TokenBatch,
    head: &mut H,
    tensors: H::Tensors<'_>,
) -> Result<Step<H::Scores>, H::Error> {
    if !batch.has_advantages() {
        return Err(Error::NoAdvantages.into());
    }
    let prepared = config
        .prepare_tokens(batch, |batch| -> Result<_, H::Error> { Ok(head.score(&tensors, batch)?.to_values()?) })?;
    // Scored before the gradient, which may overwrite the logits.
    let left_out = match batch.without(&prepared)?.filter(|_| H::Scores::FILLED) {
        Some(batch) => Some((head.score(&tensors, &batch)?, batch)),
        None => None,
    };
    let evaluator = Evaluator::new(config, &prepared)?;
    let (sums, mut scores) = head.gradient(tensors, &evaluator)?;
    if let Some((of_left_out, batch)) = left_out {
        scores.fill(&batch, &of_left_out);
    }
    Ok(Step { sums, metrics: evaluator.metrics(&sums), scores })
}
