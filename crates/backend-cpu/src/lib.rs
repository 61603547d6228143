//! The GRPO loss on this CPU: `reference`, `logits` and `fused` behind [`grpo_core::Backend`].
//!
//! Use it to train on a CPU, or to check what another backend computes: it needs nothing but Rust. Hand over hidden states
//! and the LM head (`fused` never makes `[N, V]` logits of them), or logits that are there already (`logits`, in place if
//! wanted); [`oracle`] evaluates the same loss densely in f64.
//!
//! ```
//! use backend_cpu::CpuBackend;
//! use grpo_core::*;
//!
//! # fn main() -> Result<()> {
//! let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
//! let (hidden, lm_head) = (vec![0.1_f32; n * h], vec![0.02_f32; v * h]); // [N, H] and [V, H]
//! let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])? // targets of two sequences
//!     .with_advantages(Advantages::PerSequence(vec![1.0, -0.5]))?;
//! let (dtype, layout) = (Dtype::F32, HeadLayout::VocabHidden);
//! let mut plan = CpuBackend::new().plan(&PlanRequest {
//!     loss: LossConfig::default(),
//!     implementation: Implementation::Fused,
//!     tiling: Tiling::default(),
//!     max_tokens: n,
//!     policy: PolicySpec::Hidden { hidden: h, vocab: v, dtype, layout, bias: false },
//!     gradients: GradientSpec { hidden: true, lm_head: false, bias: false },
//! })?;
//! let mut dhidden = vec![0.0; n * h]; // the gradient is added to it
//! let policy = PolicyInput::Hidden { hidden: (&hidden).into(), lm_head: (&lm_head).into(), bias: None };
//! let grads = GradsMut { hidden: Some((&mut dhidden).into()), ..GradsMut::default() };
//! let out = plan.value_and_grad(policy, &batch, grads)?;
//! assert!((out.scores.logp[0] + (v as f32).ln()).abs() < 1e-5); // every entry is equally likely here
//! # Ok(())
//! # }
//! ```
//!
//! Inputs are host slices, f32 or bf16; sums and gradients are f32, the scalars of a row f64. bf16 inputs round dL/dlogits to
//! bf16 before it is multiplied into gradients, unless [`CpuBackend::with_dlogits`] says otherwise. Kernels of the fastest
//! instruction set that the processor has are chosen at run time; [`CpuBackend::with_isa`] chooses another [`Isa`].
#![deny(unsafe_code)]

mod arch;
mod convert;
mod dense;
mod error;
mod fused;
mod gemm;
mod host;
mod logits;
pub mod oracle;
mod pages;
pub mod peak;
mod plan;
mod softmax;
mod threads;
mod tokens;

pub use arch::Isa;
use dense::DensePlan;
use error::{NAME, unsupported};
use fused::{FusedPlan, Problem, choose};
use grpo_core::error::{Error, Result};
use grpo_core::{Backend, Dtype, Implementation, LossPlan, PlanRequest, PolicySpec};
use logits::LogitsPlan;
pub use pages::advise_huge_pages;
use plan::Kernel;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;
pub use threads::most_threads;

/// The backend `cpu`: kernels, the threads that they run on, and the rounding of dL/dlogits.
///
/// ```
/// use backend_cpu::{CpuBackend, Isa};
/// use grpo_core::{Backend, Dtype};
///
/// # fn main() -> grpo_core::Result<()> {
/// let backend = CpuBackend::with_threads(2)?.with_isa(Isa::Portable).with_dlogits(Dtype::F32);
/// assert_eq!(backend.dlogits(Dtype::Bf16), Dtype::F32); // dL/dlogits keeps its digits for bf16 inputs, too
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct CpuBackend {
    pool: Option<Arc<ThreadPool>>,
    isa: Option<Isa>,
    dlogits: Option<Dtype>,
}

impl CpuBackend {
    /// Uses the rayon pool that it is called in.
    pub fn new() -> Self {
        Self::default()
    }

    /// Owns a pool of `threads` threads; 0 is one per core.
    ///
    /// # Errors
    /// [`Error::Backend`] when there are more than [`most_threads`], or they cannot be started.
    pub fn with_threads(threads: usize) -> Result<Self> {
        let failed = |message: String| Error::Backend { backend: NAME.into(), message };
        let most = most_threads();
        if threads > most {
            return Err(failed(format!("expected at most {most} threads on this machine, got {threads}")));
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("loss-{i}"))
            .build()
            .map_err(|e| failed(format!("no thread pool: {e}")))?;
        Ok(Self { pool: Some(Arc::new(pool)), ..Self::default() })
    }

    /// Uses kernels of this instruction set, not the fastest that the processor has. Plans of a set that it lacks are
    /// refused.
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// What dL/dlogits is rounded to before it is multiplied into the gradients of hidden states and head; sums are f32
    /// anyway. Without a word of this, the dtype of those inputs, as automatic differentiation of such a model would:
    /// products of bf16 are several times faster. [`Dtype::F32`] keeps it as it is, for bf16 inputs too.
    pub fn with_dlogits(mut self, dlogits: Dtype) -> Self {
        self.dlogits = Some(dlogits);
        self
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn dlogits(&self, dtype: Dtype) -> Dtype {
        self.dlogits.unwrap_or(dtype)
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        request.validate()?;
        let isa = self.isa.unwrap_or_else(Isa::detect).checked()?;
        let threads = self.pool.as_ref().map_or_else(rayon::current_num_threads, |pool| pool.current_num_threads());
        let plan = |workspace: usize, kernel: &dyn Fn() -> Box<dyn Kernel>| {
            plan::plan(request, workspace, kernel, self.pool.clone())
        };
        match (request.implementation, request.policy) {
            (Implementation::Reference, _) => plan(dense::workspace(request), &|| Box::new(DensePlan::new(request))),
            (Implementation::Fused | Implementation::Logits, PolicySpec::Hidden { hidden, layout, dtype, .. }) => {
                let problem = Problem::new(request, hidden, layout, isa, self.dlogits(dtype));
                let blocking = choose(request, &problem, threads)?;
                plan(problem.workspace(&blocking), &|| Box::new(FusedPlan::new(request, problem, blocking)))
            }
            (Implementation::Fused, PolicySpec::Logits { .. }) => Err(unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or hand over hidden states and the head",
            )),
            (Implementation::Logits, PolicySpec::Logits { .. }) => {
                plan(logits::workspace(request), &|| Box::new(LogitsPlan::new(request, isa)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_the_machine_can_use_are_refused() {
        let most = most_threads();
        assert!(most >= 64);
        let error = CpuBackend::with_threads(most + 1).expect_err("too many").to_string();
        assert!(error.contains(&format!("at most {most}")) && error.contains(&(most + 1).to_string()), "{error}");
        CpuBackend::with_threads(2).expect("a machine can use two");
    }
}
