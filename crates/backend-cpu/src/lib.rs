//! The GRPO loss on this CPU: `reference`, `logits` and `fused` behind [`grpo_core::Backend`].
//!
//! Inputs and gradients are host slices, f32 or bf16; arithmetic and gradients are f32, the scalars of a row f64.
#![deny(unsafe_code)]

mod host;
mod plan;
pub mod reference;

use grpo_core::error::{Error, Result};
use grpo_core::{Backend, Implementation, LossPlan, PlanRequest};
use plan::{CpuPlan, Kernel, unsupported};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;

pub(crate) const NAME: &str = "cpu";

/// The backend `cpu`.
#[derive(Clone, Debug, Default)]
pub struct CpuBackend {
    pool: Option<Arc<ThreadPool>>,
}

impl CpuBackend {
    /// Uses the rayon pool that it is called in.
    pub fn new() -> Self {
        Self { pool: None }
    }

    /// Owns a pool of `threads` threads; 0 is one per core.
    ///
    /// # Errors
    /// [`Error::Backend`] when the threads cannot be started.
    pub fn with_threads(threads: usize) -> Result<Self> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("loss-{i}"))
            .build()
            .map_err(|e| Error::Backend { backend: NAME.into(), message: format!("no thread pool: {e}") })?;
        Ok(Self { pool: Some(Arc::new(pool)) })
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        request.validate()?;
        let kernel: Box<dyn Kernel> = match request.implementation {
            Implementation::Reference => Box::new(reference::ReferencePlan::new(request)),
            other => return Err(unsupported(format!("implementation `{}`", other.name()), "use `reference`")),
        };
        Ok(Box::new(CpuPlan::new(request, kernel, self.pool.clone())))
    }
}
