//! The GRPO loss on this CPU: `reference`, `logits` and `fused` behind [`grpo_core::Backend`]. Use it to train on a CPU, or to
//! check what another backend computes: it needs nothing but Rust. Kernels of the fastest instruction set that the processor
//! has are chosen at run time. [`oracle`] evaluates the same loss densely in f64.
//!
//! ```
//! use backend_cpu::CpuBackend;
//! use grpo_core::{Grads, GrpoLoss, LossConfig, TokenBatch};
//!
//! let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
//! let (hidden, lm_head) = (vec![0.1_f32; n * h], vec![0.02_f32; v * h]); // [N, H] and [V, H]
//! let loss = GrpoLoss::builder(LossConfig::default()).head(h, v).max_tokens(n).build(&CpuBackend::new())?;
//! let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?.with_advantages(vec![1.0, -0.5])?;
//! let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]);
//! let out = loss.step(&hidden, &lm_head, &batch, Grads::new(&mut dhidden, &mut dlm_head))?;
//! # assert!(out.loss.is_finite() && dlm_head.iter().any(|g| *g != 0.0));
//! # Ok::<(), grpo_core::Error>(())
//! ```
//!
//! Inputs are host slices, f32 or bf16; sums and gradients are f32, the scalars of a row f64. bf16 inputs round dL/dlogits to
//! bf16 before it is multiplied into gradients, unless [`CpuBackend::with_dlogits`] says otherwise.
//!
//! Feature `rayon`, on by default: kernels run on the threads of a rayon pool. Without it they run on the caller's thread, with
//! the same results to the bit.
//!
//! **Build it with optimisations.** Without them the kernels are some 270 times slower: a step that takes 0.07 s takes 19.3 s.
//! A profile for this package alone keeps the rest of a development build as it is; in the `Cargo.toml` of the program:
//!
//! ```toml
//! [profile.dev.package.grpo-backend-cpu]
//! opt-level = 3
//! ```
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
pub mod oracle;
mod pages;
pub mod peak;
mod plan;
pub mod profile;
mod softmax;
mod threads;
mod tokens;

pub use arch::Isa;
use dense::DenseKernel;
use error::{NAME, unsupported};
use fused::{FusedKernel, Problem, choose};
use grpo_core::error::Result;
use grpo_core::{Backend, Dtype, Implementation, LossPlan, PlanRequest, PolicySpec};
use logits::LogitsKernel;
pub use pages::{advise_huge_pages, keep_freed_memory};
use plan::Kernel;
use threads::Threads;
pub use threads::most_threads;

/// The backend `cpu`.
///
/// ```
/// use backend_cpu::{CpuBackend, Isa};
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
}

impl CpuBackend {
    /// Uses the rayon pool that it is called in, or the caller's thread alone without the feature `rayon`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Owns a pool of `threads` threads; 0 is one per core. Without the feature `rayon`, 0 and 1 are the caller's thread.
    ///
    /// # Errors
    /// [`Error::Backend`](grpo_core::Error::Backend) when there are more than [`most_threads`], or they cannot be started;
    /// [`Error::Unsupported`](grpo_core::Error::Unsupported) when there is more than one and the feature `rayon` is off.
    pub fn with_threads(threads: usize) -> Result<Self> {
        Ok(Self { threads: Threads::new(threads)?, ..Self::default() })
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
        let threads = self.threads.count();
        let plan = |workspace: usize, kernel: &dyn Fn() -> Box<dyn Kernel>| {
            plan::plan(request, workspace, kernel, self.threads.clone())
        };
        match (request.implementation, request.policy) {
            (Implementation::Reference, _) => plan(dense::workspace(request), &|| Box::new(DenseKernel::new(request))),
            (Implementation::Fused | Implementation::Logits, PolicySpec::Hidden { hidden, layout, dtype, .. }) => {
                let problem = Problem::new(request, hidden, layout, isa, self.dlogits(dtype));
                let blocking = choose(request, &problem, threads)?;
                plan(problem.workspace(&blocking), &|| Box::new(FusedKernel::new(request, problem, blocking)))
            }
            (Implementation::Fused, PolicySpec::Logits { .. }) => Err(unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or pass hidden states and the head",
            )),
            (Implementation::Logits, PolicySpec::Logits { .. }) => {
                plan(logits::workspace(request), &|| Box::new(LogitsKernel::new(request, isa)))
            }
        }
    }
}
