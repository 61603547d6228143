//! One step of the loss, written once: what stands around whatever computes logits.
//!
//! A step is prepared ([`LossConfig::prepare`]: masks, the sampler's weight, chosen tokens), what the configuration leaves
//! out of the loss is scored apart, the head makes log-probabilities and takes their derivatives, and metrics are made of
//! what was added up. [`Plan`] does that for a backend that implements [`Head`]; [`step`] for one whose tensors are of
//! another kind (f64 in the oracle, tensors that stay on a device).

use crate::backend::{LossOutput, LossPlan, PlanRequest, Scores};
use crate::backend_api::columns::LossSums;
use crate::backend_api::evaluate::Evaluator;
use crate::batch::PolicyValues;
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::gradients::GradsMut;
use crate::memory_report::MemoryReport;
use crate::metrics::Metrics;
use crate::policy::PolicyInput;
use crate::tensor::TensorMut;

/// What computes logits, for batches of one shape: yields log-probabilities and entropies, takes dL/dlogp and dL/dentropy.
/// It knows nothing of clipping, KL or advantages. Calls have been checked against the plan
/// ([`PlanRequest::check_call`]).
pub trait Head: Send {
    /// Log-probabilities and entropies of the active tokens of `batch`; 0 at the others.
    ///
    /// # Errors
    /// Those of the backend.
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores>;

    /// The loss of [`Evaluator::batch`] with its gradients, which are added to `grads`; scores as [`Head::score`] makes them,
    /// bit for bit.
    ///
    /// # Errors
    /// Those of the backend; nothing has been written to `grads` then.
    fn gradient(
        &mut self,
        policy: PolicyInput<'_>,
        loss: &Evaluator<'_>,
        grads: GradsMut<'_>,
    ) -> Result<(LossSums<f64>, Scores)>;

    /// The same for logits, which are overwritten with their gradient; 0 at masked tokens.
    ///
    /// # Errors
    /// Those of the backend.
    fn gradient_in_place(&mut self, logits: TensorMut<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)>;
}

/// A planned loss: a head and everything around it.
#[derive(Debug)]
pub struct Plan<H> {
    request: PlanRequest,
    memory: MemoryReport,
    head: H,
}

impl<H: Head> Plan<H> {
    /// A plan of `request`, which needs `memory`, on `head`, which was made for it.
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

/// One evaluation of the loss, with tensors of whatever kind.
pub trait Call: Sized {
    /// Log-probability and entropy of every token, 0 at those that are not active.
    type Scores: TokenScores;

    /// Those of the active tokens of `batch`, without gradients.
    ///
    /// # Errors
    /// Those of the backend.
    fn score(&mut self, batch: &TokenBatch) -> Result<Self::Scores>;

    /// Makes the loss of [`Evaluator::batch`] and its gradients: what was added up, and the scores it was made of.
    ///
    /// # Errors
    /// Those of the backend.
    fn gradient(self, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Self::Scores)>;
}

/// Log-probabilities and entropies of a batch.
pub trait TokenScores: Sized {
    /// Whether [`step`] scores the tokens that the configuration leaves out of the loss.
    const FILLED: bool = true;

    /// On the host, widened.
    ///
    /// # Errors
    /// Those of the device that they are on.
    fn to_values(&self) -> Result<PolicyValues>;

    /// Takes over the results of `other` at the active rows of `batch`.
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

/// What [`step`] returns.
#[derive(Clone, Debug)]
pub struct Step<S> {
    /// What was added up.
    pub sums: LossSums<f64>,
    /// Metrics made of it, under TRL's names.
    pub metrics: Metrics,
    /// Of all active tokens, also of those that the configuration leaves out of the loss if [`TokenScores::FILLED`].
    pub scores: S,
}

impl From<Step<Scores>> for LossOutput {
    fn from(Step { sums, metrics, scores }: Step<Scores>) -> Self {
        Self { loss: sums.loss, policy_loss: sums.policy, value_loss: 0.0, scores, metrics }
    }
}

/// Evaluates `config` on `batch` with the policy behind `call`.
///
/// # Errors
/// [`Error::NoAdvantages`] for a batch without advantages; those of [`LossConfig::prepare`], [`Evaluator::new`] and `call`.
pub fn step<C: Call>(config: &LossConfig, batch: &TokenBatch, mut call: C) -> Result<Step<C::Scores>> {
    if !batch.has_advantages() {
        return Err(Error::NoAdvantages);
    }
    let prepared = config.prepare(batch, |batch| call.score(batch)?.to_values())?;
    // Scored before the gradient, which may overwrite logits.
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
