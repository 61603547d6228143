//! One step of the loss, independent of the head that computes logits.
//!
//! 1. Prepare the batch ([`LossConfig::prepare`]: masks, the sampler's weight, selected tokens).
//! 2. Score the tokens that the configuration excludes from the loss.
//! 3. The head computes log-probabilities and takes their derivatives.
//! 4. Compute metrics from the sums.
//!
//! [`Plan`] runs these steps for a backend that implements [`Head`], [`step`] for other kinds of tensors
//! (f64 in the oracle, tensors that stay on a device).

use crate::backend::{LossOutput, LossPlan, PlanRequest, Scores};
use crate::backend_api::evaluate::Evaluator;
use crate::backend_api::token_columns::LossSums;
use crate::batch::PolicyValues;
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::gradients::GradsMut;
use crate::memory_report::MemoryReport;
use crate::metrics::Metrics;
use crate::policy::PolicyInput;
use crate::tensor::TensorMut;

/// The computation of logits for batches of one shape: yields log-probabilities and entropies, takes dL/dlogp and dL/dentropy.
/// It does not depend on clipping, KL or advantages. Its callers have checked the arguments against the plan
/// ([`PlanRequest::check_call`]).
pub trait Head: Send {
    /// Computes log-probabilities and entropies of the active tokens of `batch`; 0 at masked tokens.
    ///
    /// # Errors
    /// The errors of the backend.
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores>;

    /// Computes the loss of [`Evaluator::batch`] and adds its gradients to `grads`. The scores equal the result of [`Head::score`] bit for
    /// bit.
    ///
    /// # Errors
    /// The errors of the backend; `grads` is unchanged after an error.
    fn gradient(
        &mut self,
        policy: PolicyInput<'_>,
        loss: &Evaluator<'_>,
        grads: GradsMut<'_>,
    ) -> Result<(LossSums<f64>, Scores)>;

    /// Computes the loss like [`Head::gradient`], for logits that it overwrites with their gradient; 0 at masked tokens.
    ///
    /// # Errors
    /// The errors of the backend.
    fn gradient_in_place(&mut self, logits: TensorMut<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)>;
}

/// A planned loss with its head.
#[derive(Debug)]
pub struct Plan<H> {
    request: PlanRequest,
    memory: MemoryReport,
    head: H,
}

impl<H: Head> Plan<H> {
    /// Creates a plan of `request`, which needs `memory`, with `head`, which was made for this request.
    pub fn new(request: &PlanRequest, memory: MemoryReport, head: H) -> Self {
        Self { request: request.clone(), memory, head }
    }
}

impl<H: Head> LossPlan for Plan<H> {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.request.check_call(&policy, batch, None)?;
        self.head.score(policy, batch)
    }

    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        self.request.check_call(&policy, batch, Some(&grads))?;
        Ok(step(&self.request.loss, batch, HeadCall { head: &mut self.head, policy, grads })?.into())
    }

    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput> {
        self.request.check_call(&PolicyInput::Logits(logits.as_ref()), batch, None)?;
        Ok(step(&self.request.loss, batch, InPlaceCall { head: &mut self.head, logits })?.into())
    }

    fn memory(&self) -> MemoryReport {
        self.memory
    }
}

/// One call of a head with its tensors.
struct HeadCall<'a, H> {
    head: &'a mut H,
    policy: PolicyInput<'a>,
    grads: GradsMut<'a>,
}

impl<H: Head> Call for HeadCall<'_, H> {
    type Scores = Scores;

    fn score(&mut self, batch: &TokenBatch) -> Result<Scores> {
        self.head.score(self.policy, batch)
    }

    fn gradient(self, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        self.head.gradient(self.policy, loss, self.grads)
    }
}

/// One call of a head with logits that it overwrites.
struct InPlaceCall<'a, H> {
    head: &'a mut H,
    logits: TensorMut<'a>,
}

impl<H: Head> Call for InPlaceCall<'_, H> {
    type Scores = Scores;

    fn score(&mut self, batch: &TokenBatch) -> Result<Scores> {
        self.head.score(PolicyInput::Logits(self.logits.as_ref()), batch)
    }

    fn gradient(self, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        self.head.gradient_in_place(self.logits, loss)
    }
}

/// One evaluation of the loss with tensors of any kind.
pub trait Call: Sized {
    /// Log-probability and entropy of every token; 0 at masked tokens.
    type Scores: TokenScores;

    /// Computes the scores of the active tokens of `batch`, without gradients.
    ///
    /// # Errors
    /// The errors of the backend.
    fn score(&mut self, batch: &TokenBatch) -> Result<Self::Scores>;

    /// Computes the loss of [`Evaluator::batch`] and its gradients; returns the sums and the scores.
    ///
    /// # Errors
    /// The errors of the backend.
    fn gradient(self, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Self::Scores)>;
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
        Self { loss: sums.loss, policy_loss: sums.policy, value_loss: 0.0, scores, metrics }
    }
}

/// Evaluates `config` on `batch` with the policy of `call`.
///
/// # Errors
/// [`Error::NoAdvantages`] for a batch without advantages; the errors of [`LossConfig::prepare`], [`Evaluator::new`] and `call`.
pub fn step<C: Call>(config: &LossConfig, batch: &TokenBatch, mut call: C) -> Result<Step<C::Scores>> {
    if !batch.has_advantages() {
        return Err(Error::NoAdvantages);
    }
    let prepared = config.prepare(batch, |batch| call.score(batch)?.to_values())?;
    // Scored before the gradient, which may overwrite the logits.
    let left_out = match batch.without(&prepared)?.filter(|_| C::Scores::FILLED) {
        Some(batch) => Some((call.score(&batch)?, batch)),
        None => None,
    };
    let evaluator = Evaluator::new(config, &prepared)?;
    let (sums, mut scores) = call.gradient(&evaluator)?;
    if let Some((of_left_out, batch)) = left_out {
        scores.fill(&batch, &of_left_out);
    }
    Ok(Step { sums, metrics: evaluator.metrics(&sums), scores })
}
