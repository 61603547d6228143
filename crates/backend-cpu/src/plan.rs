//! The wrapper around every kernel: validates, then runs the kernel in the backend's thread pool. Kernels assume.

use crate::host::{Grads, Policy};
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicyInput, Scores};
use rayon::ThreadPool;
use std::sync::Arc;

/// One implementation, planned. Inputs have been checked against the plan.
pub(crate) trait Kernel: Send {
    fn score(&mut self, policy: Policy<'_>, batch: &TokenBatch) -> Result<Scores>;
    fn value_and_grad(&mut self, policy: Policy<'_>, batch: &TokenBatch, grads: Grads<'_>) -> Result<LossOutput>;
}

/// A kernel behind its checks.
pub(crate) struct CpuPlan {
    request: PlanRequest,
    kernel: Box<dyn Kernel>,
    memory: MemoryReport,
    pool: Option<Arc<ThreadPool>>,
}

impl CpuPlan {
    /// `workspace`: bytes that `kernel`, which is made only if the machine has them, allocates.
    ///
    /// # Errors
    /// [`Error::Memory`] when a call would need more than there may be.
    pub(crate) fn new(
        request: &PlanRequest,
        workspace: usize,
        kernel: impl FnOnce() -> Box<dyn Kernel>,
        pool: Option<Arc<ThreadPool>>,
    ) -> Result<Self> {
        let (inputs, outputs) = (request.inputs_bytes(), request.outputs_bytes());
        let memory = MemoryReport { inputs, outputs, workspace };
        request.check_memory(&memory, machine_memory())?;
        Ok(Self { request: request.clone(), kernel: kernel(), memory, pool })
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
        self.memory
    }
}

/// An [`Error::Unsupported`] of this backend.
pub(crate) fn unsupported(what: impl Into<String>, instead: impl Into<String>) -> Error {
    Error::Unsupported { backend: crate::NAME.into(), what: what.into(), instead: instead.into() }
}

/// Bytes that an evaluator of `n` tokens holds: two weights per token, unless the batch brought its own. Its lists per
/// sequence are not counted.
pub(crate) fn evaluator_bytes(n: usize) -> usize {
    n.saturating_mul(16)
}

/// The memory of this machine in bytes, or of the control group that the process runs in where that has less. `None` where
/// the system does not say.
pub(crate) fn machine_memory() -> Option<usize> {
    let read = |path| std::fs::read_to_string(path).ok();
    let total = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
    });
    // "max" where the group has no limit of its own.
    let of_group = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse::<usize>().ok());
    total.into_iter().chain(of_group).min()
}
