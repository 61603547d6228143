//! The loss as a trainer calls it: planned when it is built, planned again when a batch needs more.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary.

use crate::backend::{Backend, Implementation, LossOutput, LossPlan, PlanRequest, Scores, Tiling};
use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::gradients::{GradientSpec, Grads, GradsMut};
use crate::memory_report::MemoryReport;
use crate::policy::{HeadLayout, PolicyInput, PolicySpec};
use crate::tensor::{Dtype, TensorMut, TensorRef};
use std::sync::{Arc, Mutex, MutexGuard};

/// The GRPO loss on a backend, from hidden states and LM head or from logits.
///
/// It plans for [`GrpoLossBuilder::max_tokens`] when it is built, and once more whenever a batch has more tokens than it
/// has planned for. Scores of one plan repeat bit for bit in its losses, so that an on-policy ratio is exactly 1.
///
/// Calls take `&self`, and threads may share one loss: they take turns, because a plan has one workspace. A clone shares the
/// backend (its thread pool, its device) and has a plan of its own, which it makes at its first call: give each thread a
/// clone where calls are to run at the same time.
///
/// ```
/// use backend_cpu::CpuBackend;
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
pub struct GrpoLoss {
    backend: Arc<dyn Backend>,
    /// Its `max_tokens` is the least that a plan is made for.
    request: PlanRequest,
    planned: Mutex<Option<Planned>>,
}

struct Planned {
    max_tokens: usize,
    plan: Box<dyn LossPlan>,
}

impl GrpoLoss {
    /// Begins a loss of `config`. Say what the policy hands over with [`GrpoLossBuilder::head`] or
    /// [`GrpoLossBuilder::logits`]; everything else has a default.
    pub fn builder(config: LossConfig) -> GrpoLossBuilder {
        GrpoLossBuilder {
            loss: config,
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

    /// Loss, metrics and gradients of a batch, from hidden states `[N, H]` and LM head. Gradients are added to `grads`
    /// ([`Grads::new`]; [`Grads::of_hidden`] where the head is frozen), which hold one buffer for each gradient that the loss
    /// was built to make.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Value`] or [`Error::Config`] that names the tensor or list that does not fit;
    /// [`Error::NoAdvantages`] for a batch without advantages; those of [`Backend::plan`] when a larger batch is planned for.
    pub fn step<'a>(
        &self,
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        self.step_policy(PolicyInput::head(hidden, lm_head), batch, grads)
    }

    /// The same from logits `[N, V]`; their gradient is added to `dlogits [N, V]`.
    ///
    /// # Errors
    /// As [`GrpoLoss::step`].
    pub fn step_logits<'a>(
        &self,
        logits: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
        dlogits: impl Into<TensorMut<'a>>,
    ) -> Result<LossOutput> {
        self.step_policy(PolicyInput::Logits(logits.into()), batch, Grads::of_logits(dlogits))
    }

    /// The same from logits `[N, V]` that are overwritten with their gradient, in their own dtype and 0 at masked tokens:
    /// no second `[N, V]` tensor is needed.
    ///
    /// # Errors
    /// As [`GrpoLoss::step`].
    pub fn step_logits_in_place<'a>(&self, logits: impl Into<TensorMut<'a>>, batch: &TokenBatch) -> Result<LossOutput> {
        self.with_plan(batch, |plan| plan.value_and_grad_in_place(logits.into(), batch))
    }

    /// The same from whatever the policy hands over, such as a head with a bias ([`PolicyInput::head_with_bias`]).
    ///
    /// # Errors
    /// As [`GrpoLoss::step`].
    pub fn step_policy(&self, policy: PolicyInput<'_>, batch: &TokenBatch, grads: GradsMut<'_>) -> Result<LossOutput> {
        self.with_plan(batch, |plan| plan.value_and_grad(policy, batch, grads))
    }

    /// The same with gradients in new buffers, those of this batch alone.
    ///
    /// # Errors
    /// As [`GrpoLoss::step`].
    pub fn step_owned(&self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<(LossOutput, Grads<Vec<f32>>)> {
        let mut grads = Grads::zeros(self.request.policy, self.request.gradients, batch.tokens())?;
        let output = self.step_policy(policy, batch, grads.as_mut())?;
        Ok((output, grads))
    }

    /// Log-probabilities and entropies `[N]` of a batch, from hidden states `[N, H]` and LM head and without gradients: for
    /// the old policy and the reference.
    ///
    /// # Errors
    /// As [`GrpoLoss::step`]; advantages are not needed.
    pub fn score<'a>(
        &self,
        hidden: impl Into<TensorRef<'a>>,
        lm_head: impl Into<TensorRef<'a>>,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        self.score_policy(PolicyInput::head(hidden, lm_head), batch)
    }

    /// The same from logits `[N, V]`.
    ///
    /// # Errors
    /// As [`GrpoLoss::score`].
    pub fn score_logits<'a>(&self, logits: impl Into<TensorRef<'a>>, batch: &TokenBatch) -> Result<Scores> {
        self.score_policy(PolicyInput::Logits(logits.into()), batch)
    }

    /// The same from whatever the policy hands over.
    ///
    /// # Errors
    /// As [`GrpoLoss::score`].
    pub fn score_policy(&self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.with_plan(batch, |plan| plan.score(policy, batch))
    }

    /// What the loss is.
    pub fn config(&self) -> &LossConfig {
        &self.request.loss
    }

    /// How it is computed.
    pub fn implementation(&self) -> Implementation {
        self.request.implementation
    }

    /// Shapes and dtypes of what the policy hands over.
    pub fn policy(&self) -> PolicySpec {
        self.request.policy
    }

    /// The gradients that a step makes.
    pub fn gradients(&self) -> GradientSpec {
        self.request.gradients
    }

    /// What computes the loss.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// The most tokens of a batch for which the present plan was made; 0 when there is none.
    pub fn max_tokens(&self) -> usize {
        self.lock().as_ref().map_or(0, |planned| planned.max_tokens)
    }

    /// The bytes that a call of the present plan needs at [`GrpoLoss::max_tokens`]; `None` when there is no plan.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.lock().as_ref().map(|planned| planned.plan.memory())
    }

    /// Calls `f` with a plan that is large enough for `batch`.
    fn with_plan<T>(&self, batch: &TokenBatch, f: impl FnOnce(&mut dyn LossPlan) -> Result<T>) -> Result<T> {
        let mut slot = self.lock();
        let usable = slot.take().filter(|planned| batch.tokens() <= planned.max_tokens);
        let planned = match usable {
            Some(planned) => planned,
            None => self.plan(batch.tokens())?,
        };
        f(slot.insert(planned).plan.as_mut())
    }

    fn plan(&self, tokens: usize) -> Result<Planned> {
        let max_tokens = self.request.max_tokens.max(tokens).max(1);
        let request = PlanRequest { max_tokens, ..self.request.clone() };
        Ok(Planned { max_tokens, plan: self.backend.plan(&request)? })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Planned>> {
        self.planned.lock().unwrap_or_else(|poisoned| {
            // A call has panicked in the middle: its plan is not used again.
            let mut slot = poisoned.into_inner();
            *slot = None;
            self.planned.clear_poison();
            slot
        })
    }
}

impl Clone for GrpoLoss {
    fn clone(&self) -> Self {
        let request =
            PlanRequest { max_tokens: self.max_tokens().max(self.request.max_tokens), ..self.request.clone() };
        Self { backend: Arc::clone(&self.backend), request, planned: Mutex::new(None) }
    }
}

impl std::fmt::Debug for GrpoLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrpoLoss")
            .field("backend", &self.backend.name())
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

/// A [`GrpoLoss`] that is being described. [`GrpoLossBuilder::build`] checks all of it at once.
///
/// ```
/// use backend_cpu::CpuBackend;
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
    loss: LossConfig,
    implementation: Option<Implementation>,
    tiling: Tiling,
    max_tokens: usize,
    sizes: Option<Sizes>,
    dtype: Dtype,
    layout: HeadLayout,
    bias: bool,
    gradients: Option<GradientSpec>,
}

/// H, where the policy hands over hidden states, and V.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: Option<usize>,
    vocab: usize,
}

impl GrpoLossBuilder {
    /// The policy hands over hidden states `[N, H]` and an LM head of V vocabulary entries; the loss is `fused` with the head
    /// unless [`GrpoLossBuilder::implementation`] says otherwise.
    pub fn head(mut self, hidden: usize, vocab: usize) -> Self {
        self.sizes = Some(Sizes { hidden: Some(hidden), vocab });
        self
    }

    /// The policy hands over logits `[N, V]`; the implementation is `logits` unless [`GrpoLossBuilder::implementation`] says
    /// otherwise.
    pub fn logits(mut self, vocab: usize) -> Self {
        self.sizes = Some(Sizes { hidden: None, vocab });
        self
    }

    /// The dtype of what the policy hands over, f32 unless set. Gradients are f32 in any case.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// The layout of the head, `[V, H]` unless set.
    pub fn head_layout(mut self, layout: HeadLayout) -> Self {
        self.layout = layout;
        self
    }

    /// The head has a bias `[V]`, whose gradient is made unless [`GrpoLossBuilder::gradients`] says otherwise.
    pub fn bias(mut self) -> Self {
        self.bias = true;
        self
    }

    /// The head is not trained: only the gradient of hidden states is made, which saves one product of three.
    pub fn frozen_head(self) -> Self {
        self.gradients(GradientSpec { hidden: true, lm_head: false, bias: false })
    }

    /// What the policy hands over, all at once: sizes, dtype, layout and bias.
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

    /// The gradients that a step makes. All that there are unless set.
    pub fn gradients(mut self, gradients: GradientSpec) -> Self {
        self.gradients = Some(gradients);
        self
    }

    /// How the loss is computed. It changes time and memory, not the numbers beyond a tolerance.
    pub fn implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = Some(implementation);
        self
    }

    /// Tile sizes, the workspace budget and the memory limit.
    pub fn tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self
    }

    /// The most tokens N of a batch. A larger batch is planned for when it comes, which takes no time to speak of on a CPU
    /// and seconds where programs are compiled. Without this, nothing is planned before the first batch.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// The loss on `backend`, of which it keeps a clone: an `Arc` of a backend is one, too.
    ///
    /// # Errors
    /// [`Error::Config`] when neither [`GrpoLossBuilder::head`] nor [`GrpoLossBuilder::logits`] was called, or for an illegal
    /// configuration; those of [`Backend::plan`].
    pub fn build<B: Backend + Clone + 'static>(self, backend: &B) -> Result<GrpoLoss> {
        let Self { loss, implementation, tiling, max_tokens, sizes, dtype, layout, bias, gradients } = self;
        let (policy, usual) = match sizes {
            Some(Sizes { hidden: Some(hidden), vocab }) => {
                (PolicySpec::Hidden { hidden, vocab, dtype, layout, bias }, Implementation::Fused)
            }
            Some(Sizes { hidden: None, vocab }) => (PolicySpec::Logits { vocab, dtype }, Implementation::Logits),
            None => {
                let message = "the builder of the loss does not know what the policy hands over: call head(hidden, vocab) \
                               or logits(vocab) on it";
                return Err(Error::Config(message.into()));
            }
        };
        let gradients = gradients.unwrap_or(GradientSpec { hidden: true, lm_head: true, bias });
        let implementation = implementation.unwrap_or(usual);
        let request = PlanRequest { loss, implementation, tiling, max_tokens, policy, gradients };
        PlanRequest { max_tokens: max_tokens.max(1), ..request.clone() }.validate()?;
        let loss = GrpoLoss { backend: Arc::new(backend.clone()), request, planned: Mutex::new(None) };
        if max_tokens > 0 {
            let planned = loss.plan(max_tokens)?;
            *loss.lock() = Some(planned);
        }
        Ok(loss)
    }
}
