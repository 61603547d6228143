#![doc = include_str!("../README.md")]
//! [`CpuBackend`] is a [`grpo_core::Backend`] with the implementations `reference`, `logits` and `fused`. [`oracle`] evaluates the same loss
//! densely in f64.
//!
//! Inputs are host slices, f32 or bf16; accumulators and gradients are f32, the scalars of a row f64. With bf16 inputs,
//! dL/dlogits is rounded to bf16 before the gradients' products, unless [`CpuBackend::with_dlogits`] sets another
//! dtype.
#![deny(unsafe_code)]

mod arch;
mod convert;
mod dense;
mod error;
mod fused;
mod gemm;
mod host;
pub mod layers;
mod logits;
mod optimization;
pub mod oracle;
mod pages;
pub mod peak;
mod plan;
pub mod profile;
mod softmax;
mod threads;
mod tokens;

pub use arch::Isa;
use dense::DenseHead;
use error::{NAME, unsupported};
use fused::{FusedHead, Problem, choose};
use grpo_core::error::Result;
use grpo_core::{Backend, Dtype, Implementation, LogitTransform, LossPlan, PlanRequest, PolicySpec};
use logits::LogitsHead;
pub use pages::{advise_huge_pages, keep_freed_memory};
use plan::CpuPlan;
use threads::Threads;
pub use threads::most_threads;

/// The backend `cpu`.
///
/// ```
/// use grpo_backend_cpu::{CpuBackend, Isa};
/// use grpo_core::{Backend, Dtype};
///
/// # #[cfg(feature = "rayon")] {
/// let backend = CpuBackend::with_threads(2)?.with_isa(Isa::detect()).with_dlogits(Dtype::F32);
/// assert_eq!((backend.name(), backend.dlogits(Dtype::Bf16)), ("cpu", Dtype::F32));
/// # }
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct CpuBackend {
    threads: Threads,
    isa: Option<Isa>,
    dlogits: Option<Dtype>,
    /// `true` if f32 operands of products are rounded to bf16.
    rounds: bool,
}

impl CpuBackend {
    /// Uses the caller's rayon pool, or the caller's thread without the feature `rayon`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a pool of `threads` threads; 0 means one per core. Without the feature `rayon`, 0 and 1 mean the
    /// caller's thread.
    ///
    /// # Errors
    /// [`Error::Backend`](grpo_core::Error::Backend) for more than [`most_threads`], or if they cannot be started;
    /// [`Error::Unsupported`](grpo_core::Error::Unsupported) for more than one if the feature `rayon` is off.
    pub fn with_threads(threads: usize) -> Result<Self> {
        Ok(Self { threads: Threads::new(threads)?, ..Self::default() })
    }

    /// Uses kernels of this instruction set instead of the processor's fastest one. If the processor lacks it, plans
    /// are refused.
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Sets the dtype to which dL/dlogits is rounded before the gradients' products, which accumulate in f32. The
    /// default is the inputs' dtype, as in automatic differentiation of such a model: bf16 products are several times
    /// faster. [`Dtype::F32`] disables rounding, for bf16 inputs too.
    pub fn with_dlogits(mut self, dlogits: Dtype) -> Self {
        self.dlogits = Some(dlogits);
        self
    }

    /// Sets the dtype of the operands of products with hidden states, head and dL/dlogits. The default is the inputs' dtype. With
    /// [`Dtype::Bf16`], f32 inputs are rounded to the nearest bf16 value when products pack them, without a copy of the head; sums and
    /// gradients are f32. The implementation `reference` has no such products, and dlogits in f32 contradict them: both are refused.
    ///
    /// ```
    /// use grpo_backend_cpu::CpuBackend;
    /// use grpo_core::{Backend, Dtype};
    ///
    /// let backend = CpuBackend::new().with_products(Dtype::Bf16);
    /// assert_eq!(backend.dlogits(Dtype::F32), Dtype::Bf16);
    /// ```
    #[must_use]
    pub fn with_products(mut self, dtype: Dtype) -> Self {
        self.rounds = dtype == Dtype::Bf16;
        self
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn applies(&self, _: LogitTransform) -> bool {
        true
    }

    fn dlogits(&self, dtype: Dtype) -> Dtype {
        self.dlogits.unwrap_or(if self.rounds { Dtype::Bf16 } else { dtype })
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        request.validate()?;
        optimization::KERNELS.warn_once();
        let isa = self.isa.unwrap_or_else(Isa::detect).checked()?;
        let threads = &self.threads;
        if self.rounds && request.implementation == Implementation::Reference {
            return Err(unsupported(
                "implementation `reference` with bf16 products of f32 inputs",
                "it computes in f32; use `fused` or `logits`, or f32 products",
            ));
        }
        if self.rounds && self.dlogits == Some(Dtype::F32) {
            return Err(unsupported("f32 dlogits with bf16 products of f32 inputs", "leave out one of both settings"));
        }
        match (request.implementation, request.policy) {
            (Implementation::Reference, _) => {
                CpuPlan::boxed(request, dense::workspace(request), threads, || DenseHead::new(request))
            }
            (Implementation::Fused | Implementation::Logits, PolicySpec::Hidden { hidden, layout, dtype, .. }) => {
                let problem = Problem::new(request, hidden, layout, isa, self.dlogits(dtype), self.rounds);
                let blocking = choose(request, &problem, threads.count())?;
                CpuPlan::boxed(request, problem.workspace(&blocking), threads, || {
                    FusedHead::new(request, problem, blocking)
                })
            }
            (Implementation::Fused, PolicySpec::Logits { .. }) => Err(unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or pass hidden states and the head",
            )),
            (Implementation::Logits, PolicySpec::Logits { .. }) => {
                CpuPlan::boxed(request, logits::workspace(request), threads, || LogitsHead::new(request, isa))
            }
            (other, _) => {
                Err(unsupported(format!("implementation `{}`", other.name()), "use `fused`, `logits` or `reference`"))
            }
        }
    }
}
