//! The plan of a head: checks calls, ensures tensors on the host, and runs on the backend's threads.

use crate::host::Tensors;
use crate::threads::Threads;
use grpo_core::backend_api::plan::{Head, step};
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{GradsMut, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicyInput, Scores, TensorMut};

/// A planned implementation with its head.
///
/// Requirements of every head, with their tests in `tests/fast/`: rows of masked tokens are not read
/// (`traps/masks.rs`); log-probabilities of [`Head::gradient`] and [`Head::score`] are bit-identical, for any other
/// content of the batch (`properties.rs`); if tokens share a ratio, the evaluator gets whole sequences
/// ([`crate::tokens::Chunks`]); nothing is written before the first error; the workspace matches the plan within 5 %
/// (`tests/slow_memory.rs`).
pub(crate) struct CpuPlan<H> {
    request: PlanRequest,
    memory: MemoryReport,
    threads: Threads,
    head: H,
}

impl<H> CpuPlan<H> {
    /// Plans the head that `head` makes, which allocates `workspace` bytes, if the machine has enough memory.
    ///
    /// # Errors
    /// [`Error::Memory`] if a call would exceed the memory limit.
    pub(crate) fn boxed(
        request: &PlanRequest,
        workspace: usize,
        threads: &Threads,
        head: impl FnOnce() -> H,
    ) -> Result<Box<dyn LossPlan>>
    where
        Self: LossPlan + 'static,
    {
        let (inputs, outputs) = (request.inputs_bytes(), request.outputs_bytes());
        let memory = MemoryReport { inputs, outputs, workspace };
        request.check_memory(&memory, machine_memory())?;
        Ok(Box::new(Self { request: request.clone(), memory, threads: threads.clone(), head: head() }))
    }
}

impl<H> LossPlan for CpuPlan<H>
where
    H: Send + for<'a> Head<Tensors<'a> = Tensors<'a>, Scores = Scores, Error = Error>,
{
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.request.check_call(&policy, batch, None)?;
        let tensors = Tensors::new(policy, GradsMut::default())?;
        self.threads.run(|| self.head.score(&tensors, batch))
    }

    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        self.request.check_call(&policy, batch, Some(&grads))?;
        let tensors = Tensors::new(policy, grads)?;
        let step = self.threads.run(|| step(&self.request.loss, batch, &mut self.head, tensors))?;
        Ok(step.into())
    }

    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput> {
        self.request.check_call(&PolicyInput::Logits(logits.as_ref()), batch, None)?;
        let tensors = Tensors::in_place(logits)?;
        let step = self.threads.run(|| step(&self.request.loss, batch, &mut self.head, tensors))?;
        Ok(step.into())
    }

    fn memory(&self) -> MemoryReport {
        self.memory
    }
}

/// Returns the bytes of an evaluator of `n` tokens: two weights per token, unless the batch has its own. Lists per
/// sequence are not counted.
pub(crate) fn evaluator_bytes(n: usize) -> usize {
    n.saturating_mul(16)
}

/// Returns the memory of this machine in bytes, or the limit of the process's control group if that is smaller; `None`
/// if the system reports neither.
pub(crate) fn machine_memory() -> Option<usize> {
    let read = |path| std::fs::read_to_string(path).ok();
    let total = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
    });
    // The file has "max" if the group has no limit.
    let group_limit = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse::<usize>().ok());
    total.into_iter().chain(group_limit).min()
}
