//! A backend that records its requests.

use grpo_backend_cpu::CpuBackend;
use grpo_core::{
    Backend, Error, GradsMut, LogitTransform, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicyInput, Scores,
    TensorMut, TokenBatch,
};
use std::sync::{Arc, Mutex};

/// The CPU backend with a record of calls.
#[derive(Default)]
pub(crate) struct Spy {
    backend: CpuBackend,
    pub(crate) requests: Mutex<Vec<PlanRequest>>,
    /// Per gradient call: `true` if the logits were passed for overwriting.
    pub(crate) in_place: Arc<Mutex<Vec<bool>>>,
}

struct SpyPlan {
    plan: Box<dyn LossPlan>,
    in_place: Arc<Mutex<Vec<bool>>>,
}

impl Backend for Spy {
    fn name(&self) -> &str {
        "spy"
    }

    fn applies(&self, transform: LogitTransform) -> bool {
        self.backend.applies(transform)
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>, Error> {
        self.requests.lock().unwrap().push(request.clone());
        Ok(Box::new(SpyPlan { plan: self.backend.plan(request)?, in_place: self.in_place.clone() }))
    }
}

impl LossPlan for SpyPlan {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores, Error> {
        self.plan.score(policy, batch)
    }

    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput, Error> {
        self.in_place.lock().unwrap().push(false);
        self.plan.value_and_grad(policy, batch, grads)
    }

    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput, Error> {
        self.in_place.lock().unwrap().push(true);
        self.plan.value_and_grad_in_place(logits, batch)
    }

    fn memory(&self) -> MemoryReport {
        self.plan.memory()
    }
}
