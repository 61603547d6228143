//! Plans for losses whose shapes follow from the arguments of each call.

use crate::backend::{Backend, Implementation, LossPlan, PlanRequest, Tiling};
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::custom_loss::linear;
use crate::error::{Error, Result};
use crate::gradients::GradientSpec;
use crate::logit_transforms::LogitTransform;
use crate::memory_report::MemoryReport;
use crate::policy::PolicySpec;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The plans of one loss, for wrappers that take the tensors of another library: a call with another shape, dtype or set of gradients
/// than the call before makes a new plan.
///
/// Threads may share a cache: each concurrent call has its own plan, which later calls reuse.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
/// use grpo_core::{Dtype, LossConfig, PlanCache, PolicyInput, PolicySpec, TokenBatch};
/// use std::sync::Arc;
///
/// let plans = PlanCache::new(Arc::new(CpuBackend::new()), LossConfig::default())?;
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?;
/// let logits = [0.5_f32; 2 * 8]; // [N, V]
/// let policy = PolicySpec::Logits { vocab: 8, dtype: Dtype::F32 };
/// let input = PolicyInput::Logits((&logits).into());
/// let scores = plans.with_plan(policy, None, &batch, |plan| plan.score(input, &batch))?;
/// assert!((scores.logp[0] + 8_f32.ln()).abs() < 1e-6);
/// # Ok::<(), grpo_core::Error>(())
/// ```
pub struct PlanCache {
    backend: Arc<dyn Backend>,
    loss: Arc<LossConfig>,
    implementation: Option<Implementation>,
    tiling: Tiling,
    max_tokens: usize,
    /// Plans that are not in use. The last one made the most recent call.
    idle: Mutex<Vec<Planned>>,
    /// The plans of [`PlanCache::step_with`].
    linear: OnceLock<Box<PlanCache>>,
}

struct Planned {
    request: PlanRequest,
    plan: Box<dyn LossPlan>,
}

impl PlanCache {
    /// Creates a cache without plans.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an illegal configuration; [`crate::Error::Unsupported`] for one that needs a transform of logits that
    /// the backend does not apply.
    pub fn new(backend: Arc<dyn Backend>, loss: impl Into<Arc<LossConfig>>) -> Result<Self> {
        let loss = loss.into();
        loss.validate()?;
        LogitTransform::check(&*backend, &loss, None)?;
        let (idle, linear) = <(Mutex<_>, OnceLock<_>)>::default();
        Ok(Self { backend, loss, implementation: None, tiling: Tiling::default(), max_tokens: 1, idle, linear })
    }

    /// Returns a cache without plans.
    fn without_plans(self) -> Self {
        Self { idle: Mutex::default(), linear: OnceLock::default(), ..self }
    }

    /// Sets the implementation. Without this setting it is `fused` for hidden states and `logits` for logits.
    #[must_use]
    pub fn with_implementation(self, implementation: Implementation) -> Self {
        Self { implementation: Some(implementation), ..self.without_plans() }
    }

    /// Sets tile sizes and the workspace budget.
    #[must_use]
    pub fn with_tiling(self, tiling: Tiling) -> Self {
        Self { tiling, ..self.without_plans() }
    }

    /// Plans for at least `tokens` tokens N from the start, so that growing batches cause no new plans.
    #[must_use]
    pub fn with_max_tokens(self, tokens: usize) -> Self {
        Self { max_tokens: tokens.max(1), ..self.without_plans() }
    }

    /// Returns the configuration of the loss.
    pub fn config(&self) -> &LossConfig {
        &self.loss
    }

    /// Returns the implementation that was set.
    pub fn implementation(&self) -> Option<Implementation> {
        self.implementation
    }

    /// Returns the backend.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Returns the bytes that a call needs under the most recent plan; `None` before the first call.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.idle().last().map(|planned| planned.plan.memory())
    }

    /// Returns the largest number of tokens that the most recent plan accepts; 0 before the first call.
    pub(crate) fn planned_tokens(&self) -> usize {
        self.idle().last().map_or(0, |planned| planned.request.max_tokens)
    }

    /// Calls `f` with a plan for `policy` and the tokens of `batch` that is not in use. With `gradients` = `None` (scores) a plan is
    /// reused with any gradients, because a separate plan might round in another order than the loss.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a batch that needs a transform of logits that the backend does not apply; the errors of
    /// [`Backend::plan`] and of `f`.
    pub fn with_plan<T, E: From<Error>>(
        &self,
        policy: PolicySpec,
        gradients: Option<GradientSpec>,
        batch: &TokenBatch,
        f: impl FnOnce(&mut dyn LossPlan) -> Result<T, E>,
    ) -> Result<T, E> {
        LogitTransform::check(&*self.backend, &self.loss, Some(batch))?;
        let mut planned = self.planned(policy, gradients, batch.tokens())?;
        let result = f(planned.plan.as_mut());
        self.idle().push(planned);
        result
    }

    /// Plans for `policy` and at least `tokens` tokens, unless there is such a plan.
    ///
    /// # Errors
    /// The errors of [`Backend::plan`].
    pub(crate) fn plan(&self, policy: PolicySpec, gradients: GradientSpec, tokens: usize) -> Result<()> {
        let planned = self.planned(policy, Some(gradients), tokens)?;
        self.idle().push(planned);
        Ok(())
    }

    /// Returns the cache of the loss that [`PlanCache::step_with`] differentiates.
    pub(crate) fn linear(&self) -> &Self {
        self.linear.get_or_init(|| {
            Box::new(Self {
                loss: linear(&self.loss).into(),
                idle: Mutex::default(),
                linear: OnceLock::new(),
                ..self.clone()
            })
        })
    }

    /// Takes a plan that is not in use, or makes one.
    fn planned(&self, policy: PolicySpec, gradients: Option<GradientSpec>, tokens: usize) -> Result<Planned> {
        let fits = |Planned { request, .. }: &Planned| {
            request.policy == policy
                && gradients.is_none_or(|gradients| gradients == request.gradients)
                && request.max_tokens >= tokens
        };
        let (latest, seen) = {
            let mut idle = self.idle();
            // Large batches tend to recur: a smaller shape does not shrink the plan.
            let seen = idle.iter().map(|planned| planned.request.max_tokens).max().unwrap_or(1);
            // Plans for other shapes would keep their workspaces without use.
            idle.retain(fits);
            (idle.pop(), seen)
        };
        match latest {
            Some(planned) => Ok(planned),
            None => {
                let gradients = gradients.unwrap_or(GradientSpec::all(policy));
                let request = self.request(policy, gradients, seen.max(tokens));
                Ok(Planned { plan: self.backend.plan(&request)?, request })
            }
        }
    }

    /// Returns the request for a plan of at least `tokens` tokens.
    pub(crate) fn request(&self, policy: PolicySpec, gradients: GradientSpec, tokens: usize) -> PlanRequest {
        PlanRequest {
            loss: Arc::clone(&self.loss),
            implementation: self.implementation.unwrap_or(policy.usual_implementation()),
            tiling: self.tiling.clone(),
            max_tokens: self.max_tokens.max(tokens),
            policy,
            gradients,
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Planned>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A clone shares the backend and has no plans; it plans for as many tokens.
impl Clone for PlanCache {
    fn clone(&self) -> Self {
        Self {
            backend: Arc::clone(&self.backend),
            loss: Arc::clone(&self.loss),
            implementation: self.implementation,
            tiling: self.tiling.clone(),
            max_tokens: self.max_tokens.max(self.planned_tokens()),
            idle: Mutex::default(),
            linear: OnceLock::default(),
        }
    }
}

impl std::fmt::Debug for PlanCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanCache")
            .field("backend", &self.backend.name())
            .field("loss", &self.loss)
            .field("implementation", &self.implementation)
            .field("tiling", &self.tiling)
            .field("max_tokens", &self.max_tokens)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{LossOutput, Scores};
    use crate::gradients::GradsMut;
    use crate::policy::PolicyInput;
    use crate::tensor::{Dtype, TensorMut};

    /// Counts its plans; they compute nothing.
    #[derive(Default)]
    struct Counting(Mutex<Vec<PlanRequest>>);

    impl Backend for Counting {
        fn name(&self) -> &str {
            "counting"
        }

        fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
            self.0.lock().unwrap().push(request.clone());
            Ok(Box::new(Nothing))
        }
    }

    struct Nothing;

    impl LossPlan for Nothing {
        fn score(&mut self, _: PolicyInput<'_>, _: &TokenBatch) -> Result<Scores> {
            unreachable!("the tests call no plan")
        }

        fn value_and_grad(&mut self, _: PolicyInput<'_>, _: &TokenBatch, _: GradsMut<'_>) -> Result<LossOutput> {
            unreachable!("the tests call no plan")
        }

        fn value_and_grad_in_place(&mut self, _: TensorMut<'_>, _: &TokenBatch) -> Result<LossOutput> {
            unreachable!("the tests call no plan")
        }

        fn memory(&self) -> MemoryReport {
            MemoryReport { inputs: 0, outputs: 0, workspace: 0 }
        }
    }

    #[test]
    fn concurrent_calls_have_their_own_plans_and_plans_of_other_shapes_are_dropped() {
        let backend = Arc::new(Counting::default());
        let cache = PlanCache::new(backend.clone(), LossConfig::default()).unwrap();
        let logits = |vocab| PolicySpec::Logits { vocab, dtype: Dtype::F32 };
        let batch = |tokens| TokenBatch::packed(vec![0; tokens], vec![0, tokens]).unwrap();
        let call =
            |vocab, tokens| cache.with_plan(logits(vocab), None, &batch(tokens), |_| Ok::<_, Error>(())).unwrap();
        let plans = || backend.0.lock().unwrap().len();
        let within = |_: &mut dyn LossPlan| {
            call(8, 4);
            Ok::<_, Error>(())
        };
        cache.with_plan(logits(8), None, &batch(4), within).unwrap();
        assert_eq!((plans(), cache.idle().len()), (2, 2), "a call within a call has a plan of its own");
        let within = |_: &mut dyn LossPlan| {
            call(8, 3);
            Ok::<_, Error>(())
        };
        cache.with_plan(logits(8), None, &batch(2), within).unwrap();
        assert_eq!(plans(), 2, "both plans are reused for fewer tokens");
        call(9, 1);
        assert_eq!((plans(), cache.idle().len()), (3, 1), "plans for another vocabulary are gone");
        assert_eq!(backend.0.lock().unwrap()[2].max_tokens, 4, "a plan does not shrink");
        call(9, 5);
        assert_eq!((plans(), cache.idle().len()), (4, 1), "more tokens");
    }
}
