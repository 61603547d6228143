//! The loss as a trainer calls it: planned when it is built, and planned again for larger batches.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary.

use crate::backend::{Backend, Implementation, LossOutput, LossPlan, Scores, Tiling};
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::custom_loss::CustomLoss;
use crate::error::{Error, Result};
use crate::gradients::{GradientSpec, Grads, GradsMut};
use crate::memory_report::MemoryReport;
use crate::plan_cache::PlanCache;
use crate::policy::{HeadLayout, PolicyInput, PolicySpec};
use crate::tensor::{Dtype, TensorMut, TensorRef};
use std::sync::Arc;

/// The GRPO loss on a backend, from hidden states and LM head or from logits.
///
/// It plans for [`GrpoLossBuilder::max_tokens`] when it is built, and again whenever a batch has more tokens than the
/// current plan. Scores and losses of one plan have bit-identical log-probabilities, so that an on-policy ratio is exactly 1.
///
/// Calls take `&self`, and threads may share one loss: each concurrent call has its own plan, with its own workspace, which later calls
/// reuse. A clone shares the backend (its thread pool, its device) and has its own plan, created at its first call.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
/// use grpo_core::{Grads, GrpoLoss, LossConfig, TokenBatch};
///
/// let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
/// let (hidden, lm_head) = (vec![0.1_f32; n * h], vec![0.02_f32; v * h]); // [N, H] and [V, H]
/// let loss = GrpoLoss::builder(LossConfig::default()).head(h, v).max_tokens(n).build(&CpuBackend::new())?;
///
/// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?.with_advantages(vec![1.0, -0.5])?;
/// let old = loss.score(&hidden, &lm_head, &batch)?; // before the first update
/// let batch = batch.with_old_logp(old.logp)?;
/// let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]);
/// let out = loss.step(&hidden, &lm_head, &batch, Grads::new(&mut dhidden, &mut dlm_head))?;
/// assert!(out.loss.is_finite() && dlm_head.iter().any(|g| *g != 0.0));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GrpoLoss {
    plans: PlanCache,
    policy: PolicySpec,
    gradients: GradientSpec,
}

impl GrpoLoss {
    /// Starts a builder for a loss of `config`. Set the policy's output with [`GrpoLossBuilder::head`] or
    /// [`GrpoLossBuilder::logits`]; everything else has a default.
    pub fn builder(config: impl Into<Arc<LossConfig>>) -> GrpoLossBuilder {
        GrpoLossBuilder {
            loss: config.into(),
            implementation: None,
            tiling: Tiling::default(),
            max_tokens: 0,
            sizes: None,
            dtype: Dtype::default(),
            layout: HeadLayout::default(),
            bias: false,
            gradients: None,
        }
    }

    /// Computes loss, metrics and gradients of a batch from hidden states `[N, H]` and LM head. Gradients are added to `grads`
    /// ([`Grads::new`]; [`Grads::of_hidden`] for a frozen head), which has one buffer for each gradient that the loss
    /// was built to compute.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Value`] or [`Error::Config`] that names the tensor or list that does not fit;
    /// [`Error::NoAdvantages`] for a batch without advantages; the errors of [`Backend::plan`] if the batch needs a larger plan.
    pub fn step<'a>(
        &self,
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        self.step_policy(PolicyInput::head(hidden, lm_head), batch, grads)
    }

    /// Computes a step like [`GrpoLoss::step`], from logits `[N, V]`; their gradient is added to `dlogits [N, V]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::step`].
    pub fn step_logits<'a>(
        &self,
        logits: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
        dlogits: impl Into<TensorMut<'a>>,
    ) -> Result<LossOutput> {
        self.step_policy(PolicyInput::Logits(logits.into()), batch, Grads::of_logits(dlogits))
    }

    /// Computes a step like [`GrpoLoss::step`], from logits `[N, V]` that it overwrites with their gradient in their own dtype, 0 at masked
    /// tokens.
    /// No second `[N, V]` tensor is needed.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::step`].
    pub fn step_logits_in_place<'a>(&self, logits: impl Into<TensorMut<'a>>, batch: &TokenBatch) -> Result<LossOutput> {
        self.with_plan(batch, |plan| plan.value_and_grad_in_place(logits.into(), batch))
    }

    /// Computes a step like [`GrpoLoss::step`], for any output of a policy, such as a head with a bias ([`PolicyInput::head_with_bias`]).
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::step`].
    pub fn step_policy(&self, policy: PolicyInput<'_>, batch: &TokenBatch, grads: GradsMut<'_>) -> Result<LossOutput> {
        self.with_plan(batch, |plan| plan.value_and_grad(policy, batch, grads))
    }

    /// Computes a step like [`GrpoLoss::step_policy`], with gradients of this batch in new buffers.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::step`].
    pub fn step_owned(&self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<(LossOutput, Grads<Vec<f32>>)> {
        let mut grads = Grads::zeros(self.policy, self.gradients, batch.tokens())?;
        let output = self.step_policy(policy, batch, grads.as_mut())?;
        Ok((output, grads))
    }

    /// Computes a loss of the caller, and adds its gradients to `grads`: `loss` returns the loss and its derivatives for the scores of the
    /// batch. Of the configuration, only temperature, logit scale and softcap apply. A step costs one forward pass more than a built-in loss.
    ///
    /// ```
    /// use grpo_backend_cpu::CpuBackend;
    /// use grpo_core::{CustomLoss, Grads, GrpoLoss, LossConfig, PolicyInput, TokenBatch};
    ///
    /// let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
    /// let (hidden, lm_head) = (vec![0.1_f32; n * h], vec![0.02_f32; v * h]);
    /// let grpo = GrpoLoss::builder(LossConfig::default()).head(h, v).build(&CpuBackend::new())?;
    /// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?;
    /// let rewards = [1.0, -0.5]; // of the sequences
    /// let (mut dhidden, mut dlm_head) = (vec![0.0; n * h], vec![0.0; v * h]);
    /// let grads = Grads::new(&mut dhidden, &mut dlm_head);
    /// // REINFORCE: minus the mean of reward x logp.
    /// let out = grpo.step_with(PolicyInput::head(&hidden, &lm_head), &batch, grads, |scores| {
    ///     let mut loss = CustomLoss { dlogp: vec![0.0; n], ..CustomLoss::default() };
    ///     for sequence in 0..batch.sequences() {
    ///         for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
    ///             loss.dlogp[row] = -rewards[sequence] / batch.active_tokens() as f64;
    ///             loss.loss += loss.dlogp[row] * f64::from(scores.logp[row]);
    ///         }
    ///     }
    ///     Ok(loss)
    /// })?;
    /// assert!(out.loss.is_finite() && dlm_head.iter().any(|g| *g != 0.0));
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`PlanCache::step_with`].
    pub fn step_with(
        &self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
        loss: impl FnOnce(&Scores) -> Result<CustomLoss>,
    ) -> Result<LossOutput> {
        self.plans.step_with((self.policy, self.gradients), policy, batch, grads, loss)
    }

    /// Computes log-probabilities and entropies `[N]` of a batch from hidden states `[N, H]` and LM head, without gradients: for
    /// the old policy and the reference.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::step`]; advantages are not required.
    pub fn score<'a>(
        &self,
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        self.score_policy(PolicyInput::head(hidden, lm_head), batch)
    }

    /// Computes scores like [`GrpoLoss::score`], from logits `[N, V]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::score`].
    pub fn score_logits<'a>(&self, logits: impl Into<TensorRef<'a>>, batch: &TokenBatch) -> Result<Scores> {
        self.score_policy(PolicyInput::Logits(logits.into()), batch)
    }

    /// Computes scores like [`GrpoLoss::score`], for any output of a policy.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::score`].
    pub fn score_policy(&self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.with_plan(batch, |plan| plan.score(policy, batch))
    }

    /// Returns the configuration of the loss.
    pub fn config(&self) -> &LossConfig {
        self.plans.config()
    }

    /// Returns the implementation that computes the loss.
    pub fn implementation(&self) -> Implementation {
        self.plans.implementation().unwrap_or(self.policy.usual_implementation())
    }

    /// Returns shapes and dtypes of the policy's output.
    pub fn policy(&self) -> PolicySpec {
        self.policy
    }

    /// Returns the gradients that a step computes.
    pub fn gradients(&self) -> GradientSpec {
        self.gradients
    }

    /// Returns the backend.
    pub fn backend(&self) -> &dyn Backend {
        self.plans.backend()
    }

    /// Returns the largest number of tokens that the current plan accepts; 0 if there is no plan that is not in use.
    pub fn max_tokens(&self) -> usize {
        self.plans.planned_tokens()
    }

    /// Returns the bytes that a call of the current plan needs at [`GrpoLoss::max_tokens`]; `None` if there is no plan that is not in use.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.plans.memory()
    }

    /// Calls `f` with a plan that is large enough for `batch`.
    fn with_plan<T>(&self, batch: &TokenBatch, f: impl FnOnce(&mut dyn LossPlan) -> Result<T>) -> Result<T> {
        self.plans.with_plan(self.policy, Some(self.gradients), batch, f)
    }
}

/// The builder of a [`GrpoLoss`]. [`GrpoLossBuilder::build`] checks all its settings.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
/// use grpo_core::{Dtype, GrpoLoss, HeadLayout, Implementation, LossConfig, Tiling};
///
/// let loss = GrpoLoss::builder(LossConfig::default())
///     .head(64, 1000)
///     .dtype(Dtype::Bf16) // of hidden states, head and bias
///     .head_layout(HeadLayout::HiddenVocab)
///     .bias()
///     .frozen_head()
///     .implementation(Implementation::Fused)
///     .tiling(Tiling { workspace_budget: 32 << 20, ..Tiling::default() })
///     .max_tokens(512)
///     .build(&CpuBackend::new())?;
/// assert!(loss.memory().is_some_and(|memory| memory.workspace <= 32 << 20));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct GrpoLossBuilder {
    loss: Arc<LossConfig>,
    implementation: Option<Implementation>,
    tiling: Tiling,
    max_tokens: usize,
    sizes: Option<Sizes>,
    dtype: Dtype,
    layout: HeadLayout,
    bias: bool,
    gradients: Option<GradientSpec>,
}

/// H, if the policy's output is hidden states, and V.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: Option<usize>,
    vocab: usize,
}

impl GrpoLossBuilder {
    /// Sets the policy's output to hidden states `[N, H]` and an LM head of V vocabulary entries. The implementation is `fused`
    /// unless set with [`GrpoLossBuilder::implementation`].
    pub fn head(mut self, hidden: usize, vocab: usize) -> Self {
        self.sizes = Some(Sizes { hidden: Some(hidden), vocab });
        self
    }

    /// Sets the policy's output to logits `[N, V]`. The implementation is `logits` unless set with
    /// [`GrpoLossBuilder::implementation`].
    pub fn logits(mut self, vocab: usize) -> Self {
        self.sizes = Some(Sizes { hidden: None, vocab });
        self
    }

    /// Sets the dtype of the policy's output; default f32. Gradients are always f32.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the layout of the head; default `[V, H]`.
    pub fn head_layout(mut self, layout: HeadLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Adds a bias `[V]` to the head. Its gradient is computed unless [`GrpoLossBuilder::gradients`] excludes it.
    pub fn bias(mut self) -> Self {
        self.bias = true;
        self
    }

    /// Freezes the head: only the gradient of hidden states is computed, which saves one of three matrix products.
    pub fn frozen_head(self) -> Self {
        self.gradients(GradientSpec { hidden: true, lm_head: false, bias: false })
    }

    /// Sets sizes, dtype, layout and bias of the policy's output at once.
    pub fn policy(mut self, policy: PolicySpec) -> Self {
        (self.dtype, self.sizes) = match policy {
            PolicySpec::Logits { vocab, dtype } => (dtype, Some(Sizes { hidden: None, vocab })),
            PolicySpec::Hidden { hidden, vocab, dtype, layout, bias } => {
                (self.layout, self.bias) = (layout, bias);
                (dtype, Some(Sizes { hidden: Some(hidden), vocab }))
            }
        };
        self
    }

    /// Sets the gradients that a step computes; default all.
    pub fn gradients(mut self, gradients: GradientSpec) -> Self {
        self.gradients = Some(gradients);
        self
    }

    /// Sets the implementation. It changes time and memory, and numbers only within tolerance.
    pub fn implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = Some(implementation);
        self
    }

    /// Sets tile sizes, the workspace budget and the memory limit.
    pub fn tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self
    }

    /// Sets the largest number of tokens N of a batch. A larger batch causes a new plan, which takes negligible time on a CPU
    /// and seconds on a backend that compiles. Without this setting the first batch causes the first plan.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Builds the loss on a clone of `backend`, which checks the settings; an `Arc` of a backend is a backend, too.
    ///
    /// # Errors
    /// [`Error::Config`] if neither [`GrpoLossBuilder::head`] nor [`GrpoLossBuilder::logits`] was called, or for an illegal
    /// configuration; [`Error::Unsupported`] for a combination that the backend does not offer, such as `fused` on logits, or for a
    /// transform of logits that it does not apply ([`Backend::applies`]); the errors of [`Backend::plan`] if
    /// [`GrpoLossBuilder::max_tokens`] is set, else the errors of [`Backend::check`].
    pub fn build<B: Backend + Clone + 'static>(self, backend: &B) -> Result<GrpoLoss> {
        let Self { loss, implementation, tiling, max_tokens, sizes, dtype, layout, bias, gradients } = self;
        let policy = match sizes {
            Some(Sizes { hidden: Some(hidden), vocab }) => PolicySpec::Hidden { hidden, vocab, dtype, layout, bias },
            Some(Sizes { hidden: None, vocab }) => PolicySpec::Logits { vocab, dtype },
            None => {
                let message = "the builder of the loss lacks the policy's output: call head(hidden, vocab) or \
                               logits(vocab) on it";
                return Err(Error::Config(message.into()));
            }
        };
        let gradients = gradients.unwrap_or(GradientSpec { hidden: true, lm_head: true, bias });
        let mut plans =
            PlanCache::new(Arc::new(backend.clone()), loss)?.with_tiling(tiling).with_max_tokens(max_tokens);
        if let Some(implementation) = implementation {
            plans = plans.with_implementation(implementation);
        }
        plans.request(policy, gradients, max_tokens).validate()?;
        match max_tokens {
            0 => backend.check(&plans.request(policy, gradients, 1))?,
            _ => plans.plan(policy, gradients, max_tokens)?,
        }
        Ok(GrpoLoss { plans, policy, gradients })
    }
}
