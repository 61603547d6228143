//! The wrapper around every kernel: validates, then runs the kernel in the backend's thread pool. Kernels assume.

use crate::host::{Grads, Policy};
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicyInput, PolicySpec, Scores};
use rayon::ThreadPool;
use std::sync::Arc;

/// One implementation, planned. Inputs have been checked against the plan.
pub(crate) trait Kernel: Send {
    fn score(&mut self, policy: Policy<'_>, batch: &TokenBatch) -> Result<Scores>;
    fn value_and_grad(&mut self, policy: Policy<'_>, batch: &TokenBatch, grads: Grads<'_>) -> Result<LossOutput>;
    fn memory(&self) -> MemoryReport;
}

/// A kernel behind its checks.
pub(crate) struct CpuPlan {
    request: PlanRequest,
    kernel: Box<dyn Kernel>,
    pool: Option<Arc<ThreadPool>>,
}

impl CpuPlan {
    pub(crate) fn new(request: &PlanRequest, kernel: Box<dyn Kernel>, pool: Option<Arc<ThreadPool>>) -> Self {
        Self { request: request.clone(), kernel, pool }
    }
}

impl LossPlan for CpuPlan {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.request.check_call(&policy, batch, None)?;
        let (policy, kernel) = (Policy::new(policy)?, &mut self.kernel);
        match &self.pool {
            Some(pool) => pool.install(|| kernel.score(policy, batch)),
            None => kernel.score(policy, batch),
        }
    }

    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        self.request.check_call(&policy, batch, Some(&grads))?;
        let (policy, grads, kernel) = (Policy::new(policy)?, Grads::new(grads)?, &mut self.kernel);
        let loss = &self.request.loss;
        let run = || {
            let prepared = loss.prepare(batch, |batch| Ok::<_, Error>(kernel.score(policy.read(), batch)?.into()))?;
            // What the configuration masks is scored apart, before logits may be overwritten.
            let left_out = match batch.without(&prepared)? {
                Some(batch) => Some((kernel.score(policy.read(), &batch)?, batch)),
                None => None,
            };
            let mut output = kernel.value_and_grad(policy, &prepared, grads)?;
            if let Some((scores, batch)) = left_out {
                output.scores.fill(&batch, &scores);
            }
            Ok(output)
        };
        match &self.pool {
            Some(pool) => pool.install(run),
            None => run(),
        }
    }

    fn memory(&self) -> MemoryReport {
        self.kernel.memory()
    }
}

/// An [`Error::Unsupported`] of this backend.
pub(crate) fn unsupported(what: impl Into<String>, instead: impl Into<String>) -> Error {
    Error::Unsupported { backend: crate::NAME.into(), what: what.into(), instead: instead.into() }
}

/// Bytes of the policy's output at `max_tokens`.
pub(crate) fn inputs_bytes(request: &PlanRequest) -> usize {
    let n = request.max_tokens;
    let elements = match request.policy {
        PolicySpec::Logits { vocab, .. } => n * vocab,
        PolicySpec::Hidden { hidden, vocab, bias, .. } => n * hidden + vocab * hidden + if bias { vocab } else { 0 },
    };
    elements * request.policy.dtype().bytes()
}

/// Bytes of the planned gradients and of logp and entropy at `max_tokens`. Gradients of logits are counted as a buffer
/// of their own; made in place they cost nothing.
pub(crate) fn outputs_bytes(request: &PlanRequest) -> usize {
    let (n, wanted) = (request.max_tokens, request.gradients);
    let elements = |wanted: bool, elements: usize| if wanted { elements } else { 0 };
    let gradients = match request.policy {
        PolicySpec::Logits { vocab, .. } => elements(wanted.hidden, n * vocab),
        PolicySpec::Hidden { hidden, vocab, .. } => {
            elements(wanted.hidden, n * hidden)
                + elements(wanted.lm_head, vocab * hidden)
                + elements(wanted.bias, vocab)
        }
    };
    4 * gradients + 8 * n
}

/// Bytes that an evaluator of `n` tokens holds: two weights per token, unless the batch brought its own. Its lists per
/// sequence are not counted.
pub(crate) fn evaluator_bytes(n: usize) -> usize {
    16 * n
}
