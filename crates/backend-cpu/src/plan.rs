//! Connects a kernel, as a head, to [`grpo_core::backend_api::plan::Plan`]: ensures tensors on the host, and the
//! backend's threads.

use crate::host::{self, Grads, Slice, SliceMut};
use crate::threads::Threads;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::{Head, Plan};
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::{GradsMut, LossPlan, MemoryReport, PlanRequest, PolicyInput, PolicyOutput, Scores, TensorMut};

/// One planned implementation. Inputs have been checked against the plan, and are on the host.
///
/// Requirements of every kernel, with their tests in `tests/fast/`: rows of masked tokens are not read
/// (`traps/masks.rs`); log-probabilities of [`Kernel::gradient`] and [`Kernel::score`] are bit-identical, for any other
/// content of the batch (`properties.rs`); if tokens share a ratio, an [`Evaluator`] gets whole sequences
/// ([`crate::tokens::Chunks`]); nothing is written before the first error; the workspace matches the plan within 5 %
/// (`tests/fast_memory.rs`).
pub(crate) trait Kernel: Send {
    fn score(&mut self, policy: PolicyOutput<Slice<'_>>, batch: &TokenBatch) -> Result<Scores>;
    fn gradient(
        &mut self,
        policy: PolicyOutput<Slice<'_>>,
        loss: &Evaluator<'_>,
        grads: Grads<'_>,
    ) -> Result<(LossSums<f64>, Scores)>;
    /// Overwrites logits with their gradient, with zeros at masked tokens. Only called on plans of precomputed logits.
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

/// Plans `kernel`, which allocates `workspace` bytes; it is created only if the machine has enough memory.
///
/// # Errors
/// [`grpo_core::Error::Memory`] if a call would exceed the memory limit.
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
    let of_group = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse::<usize>().ok());
    total.into_iter().chain(of_group).min()
}
