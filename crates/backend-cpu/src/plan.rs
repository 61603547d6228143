//! A kernel as the head of a [`grpo_core::backend_api::plan::Plan`], which has checked what kernels assume: tensors on the host, the
//! backend's threads.

use crate::host::{self, Grads, Slice, SliceMut};
use crate::threads::Threads;
use grpo_core::backend_api::columns::LossSums;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::{Head, Plan};
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::{GradsMut, LossPlan, MemoryReport, PlanRequest, PolicyInput, PolicyOutput, Scores, TensorMut};

/// One implementation, planned. Inputs have been checked against the plan, and lie on the host.
///
/// What every kernel has to keep, and where the tests ask for it (`tests/fast/`): rows of masked tokens are not read (`traps/masks.rs`);
/// log-probabilities of [`Kernel::gradient`] are those of [`Kernel::score`] to the bit, whatever else is in the batch
/// (`properties.rs`); where tokens share a ratio, an [`Evaluator`] sees whole sequences ([`crate::tokens::Chunks`]);
/// nothing is written before the first error; the workspace is what was planned, within 5 % (`tests/fast_memory.rs`).
pub(crate) trait Kernel: Send {
    fn score(&mut self, policy: PolicyOutput<Slice<'_>>, batch: &TokenBatch) -> Result<Scores>;
    fn gradient(
        &mut self,
        policy: PolicyOutput<Slice<'_>>,
        loss: &Evaluator<'_>,
        grads: Grads<'_>,
    ) -> Result<(LossSums<f64>, Scores)>;
    /// Overwrites logits with their gradient, with zeros at masked tokens. Only plans of given logits are asked to.
    fn gradient_in_place(&mut self, logits: SliceMut<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)>;
}

/// A kernel on the backend's threads.
pub(crate) struct CpuHead {
    kernel: Box<dyn Kernel>,
    threads: Threads,
}

impl CpuHead {
    fn run<T: Send>(&mut self, f: impl FnOnce(&mut dyn Kernel) -> T + Send) -> T {
        let kernel = self.kernel.as_mut();
        self.threads.run(|| f(kernel))
    }
}

impl Head for CpuHead {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        let policy = host::policy(policy)?;
        self.run(|kernel| kernel.score(policy, batch))
    }

    fn gradient(
        &mut self,
        policy: PolicyInput<'_>,
        loss: &Evaluator<'_>,
        grads: GradsMut<'_>,
    ) -> Result<(LossSums<f64>, Scores)> {
        let (policy, grads) = (host::policy(policy)?, host::grads(grads)?);
        self.run(|kernel| kernel.gradient(policy, loss, grads))
    }

    fn gradient_in_place(&mut self, logits: TensorMut<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let logits = host::in_place(logits)?;
        self.run(|kernel| kernel.gradient_in_place(logits, loss))
    }
}

/// Plans `kernel`, which allocates `workspace` bytes and is made only if the machine has them.
///
/// # Errors
/// [`grpo_core::Error::Memory`] when a call would need more than there may be.
pub(crate) fn plan(
    request: &PlanRequest,
    workspace: usize,
    kernel: impl FnOnce() -> Box<dyn Kernel>,
    threads: Threads,
) -> Result<Box<dyn LossPlan>> {
    let (inputs, outputs) = (request.inputs_bytes(), request.outputs_bytes());
    let memory = MemoryReport { inputs, outputs, workspace };
    request.check_memory(&memory, machine_memory())?;
    Ok(Box::new(Plan::new(request, memory, CpuHead { kernel: kernel(), threads })))
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
