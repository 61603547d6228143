//! The interface between the loss and its backends.
//!
//! A [`Backend`] turns a [`PlanRequest`] into a [`LossPlan`] once; the plan is then called for every micro-batch.
//! A backend yields log-probability and entropy per token and takes dL/dlogp and dL/dentropy. It does not depend on clipping, KL or
//! advantages.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary. All host tensors are contiguous and row-major.

use crate::batch::{PolicyValues, TokenBatch};
use crate::config::{LossConfig, TemperatureMode};
use crate::error::{Error, Result};
use crate::gradients::{GradientSpec, GradsMut};
use crate::logit_transforms::LogitTransform;
use crate::memory_report::MemoryReport;
use crate::metrics::Metrics;
use crate::policy::{PolicyInput, PolicySpec};
use crate::tensor::{Dtype, TensorMut};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::sync::Arc;

/// The algorithm that computes the loss. The choice changes time and memory, and numbers only within tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Implementation {
    /// Dense and simple; holds [N, V] logits and their gradient.
    Reference,
    /// Tiled over precomputed logits. For hidden states it materialises [N, V] logits first.
    Logits,
    /// Hidden states x LM head, tile by tile; never holds an [N, V] tensor.
    #[default]
    Fused,
}

impl Implementation {
    /// All implementations.
    pub const ALL: [Self; 3] = [Self::Reference, Self::Logits, Self::Fused];

    /// Returns the implementation called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|implementation| implementation.name() == name)
    }

    /// Returns the name used in configuration and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Logits => "logits",
            Self::Fused => "fused",
        }
    }
}

impl PolicySpec {
    /// Returns the implementation that computes the loss of such an output if none is set.
    pub(crate) fn usual_implementation(&self) -> Implementation {
        match self {
            Self::Logits { .. } => Implementation::Logits,
            Self::Hidden { .. } => Implementation::Fused,
        }
    }
}

/// Order of the fused loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoopOrder {
    /// Chunks of tokens against the whole vocabulary: three matrix products, the head is streamed once per chunk.
    TokenChunks,
    /// Panels of the vocabulary against all tokens: logits are recomputed (four matrix products), the head is streamed twice.
    VocabPanels,
}

/// Sizes that trade time for memory. `None` lets the plan choose.
///
/// ```
/// use grpo_core::Tiling;
///
/// // 32 MiB of workspace, and at most 8 GiB for a call in total.
/// let tiling = Tiling { workspace_budget: 32 << 20, memory_limit: Some(8 << 30), ..Tiling::default() };
/// assert_eq!(tiling.token_chunk, None);
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tiling {
    /// Largest workspace in bytes, in addition to inputs, outputs and gradients. The fused plan chooses its tile sizes to fit.
    #[default(128 << 20)]
    pub workspace_budget: usize,
    /// Tokens per tile. Gradients of the head are summed over tiles, so their last bits depend on this size. Set it to make them
    /// independent of the other inputs of the plan (the budget, the number of threads).
    pub token_chunk: Option<usize>,
    /// Vocabulary entries per tile.
    pub vocab_block: Option<usize>,
    /// Order of the fused loops.
    pub loop_order: Option<LoopOrder>,
    /// Largest total memory of a call in bytes: inputs, outputs and workspace ([`MemoryReport::total`]). A plan that needs
    /// more is refused before it allocates. `None` means the machine's memory on a CPU, and no limit on a device.
    pub memory_limit: Option<usize>,
}

/// Everything that a backend needs before the first batch. [`GrpoLoss`](crate::GrpoLoss) builds it for its callers; authors of backends
/// and wrappers use it directly.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
/// use grpo_core::{
///     Backend, Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicyInput, PolicySpec, Tiling,
///     TokenBatch,
/// };
///
/// let request = PlanRequest {
///     loss: LossConfig::default().into(),
///     implementation: Implementation::Fused,
///     tiling: Tiling { workspace_budget: 16 << 20, ..Tiling::default() },
///     max_tokens: 4,
///     policy: PolicySpec::Hidden {
///         hidden: 8,
///         vocab: 32,
///         dtype: Dtype::F32,
///         layout: HeadLayout::VocabHidden,
///         bias: false,
///     },
///     gradients: GradientSpec { lm_head: false, ..GradientSpec::default() }, // a frozen head
/// };
/// let mut plan = CpuBackend::new().plan(&request)?;
/// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?;
/// let scores = plan.score(PolicyInput::head(&[0.1_f32; 4 * 8], &[0.02_f32; 32 * 8]), &batch)?;
/// assert_eq!(scores.logp.len(), 4);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// Configuration of the loss, which everything made from this request shares.
    pub loss: Arc<LossConfig>,
    /// The algorithm.
    pub implementation: Implementation,
    /// Tile sizes and memory limits.
    pub tiling: Tiling,
    /// Largest number of tokens N of a batch; smaller batches are allowed.
    pub max_tokens: usize,
    /// Shapes and dtypes of the policy's output.
    pub policy: PolicySpec,
    /// Gradients to compute.
    pub gradients: GradientSpec,
}

/// Per-token results, in nats; 0 at masked tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Log-probability of the target `[N]`.
    pub logp: Vec<f32>,
    /// Entropy of its distribution `[N]`.
    pub entropy: Vec<f32>,
}

impl From<Scores> for PolicyValues {
    fn from(scores: Scores) -> Self {
        let widened = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        Self { logp: widened(scores.logp), entropy: widened(scores.entropy) }
    }
}

impl Scores {
    /// Checks that every active token of `batch` has a finite log-probability and entropy.
    ///
    /// # Errors
    /// [`Error::Value`] that names the first such token with its sequence and position;
    /// [`Error::Shape`] for scores of another batch.
    pub fn check_finite(&self, batch: &TokenBatch) -> Result<()> {
        batch.check_computed("logp", &self.logp)?;
        batch.check_computed("entropy", &self.entropy)
    }
}

/// The result of one `value_and_grad`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LossOutput {
    /// Sum over tokens of weight x token loss. The losses of a step's micro-batches add up.
    pub loss: f64,
    /// The share of the policy term (TRL's `policy_loss`).
    pub policy_loss: f64,
    /// The mean value loss before its coefficient, if the caller also trains a value function
    /// ([`crate::objective::ValueLossConfig`]); `loss` includes it with its coefficient. Else 0.
    pub value_loss: f64,
    /// Scores of all active tokens of the batch, including tokens that the configuration excludes from the
    /// loss. Log-probabilities equal the result of `score` for the same input bit for bit; entropies do so too
    /// on backends without a compiler that reorders operations.
    pub scores: Scores,
    /// TRL's metrics as mergeable sums.
    pub metrics: Metrics,
}

impl LossOutput {
    /// Creates the result of a backend, without a value loss.
    pub fn new(loss: f64, policy_loss: f64, scores: Scores, metrics: Metrics) -> Self {
        Self { loss, policy_loss, value_loss: 0.0, scores, metrics }
    }

    /// Adds the next micro-batch of the step: sums losses, appends scores, merges metrics.
    pub fn merge(&mut self, next: Self) {
        self.loss += next.loss;
        self.policy_loss += next.policy_loss;
        self.value_loss += next.value_loss;
        self.scores.logp.extend(next.scores.logp);
        self.scores.entropy.extend(next.scores.entropy);
        self.metrics.merge(&next.metrics);
    }

    /// Checks that scores at active tokens and the loss are finite.
    ///
    /// As in PyTorch, NaN in hidden states, head or logits of an active token is no error of
    /// [`LossPlan::value_and_grad`]: loss, log-probability and gradients become NaN. Call this before an optimizer step.
    ///
    /// # Errors
    /// [`Error::Value`] that names the first active token of `batch` whose log-probability or entropy is not finite, with
    /// its sequence and position, or else the loss.
    pub fn check_finite(&self, batch: &TokenBatch) -> Result<()> {
        self.scores.check_finite(batch)?;
        match self.loss.is_finite() {
            true => Ok(()),
            false => Err(Error::value(
                "loss",
                "the batch as a whole",
                format!("{}, although every log-probability is finite: a term of it overflows", self.loss),
            )),
        }
    }
}

/// An implementation of the loss on some hardware.
pub trait Backend: Send + Sync {
    /// Returns the name: `cpu`, `pjrt:tpu`, ...
    fn name(&self) -> &str;

    /// Validates the request, chooses tiles, allocates or compiles.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a combination that this backend does not offer, [`Error::Budget`] if the workspace
    /// budget is too small, [`Error::Config`] or [`Error::Shape`] for an illegal request.
    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>>;

    /// Checks a request as far as that is possible without large allocations and without a compiler, for
    /// [`GrpoLossBuilder::build`](crate::GrpoLossBuilder::build). The default plans for one token, unless the backend compiles.
    ///
    /// # Errors
    /// The errors of [`Backend::plan`].
    fn check(&self, request: &PlanRequest) -> Result<()> {
        if self.compiles() {
            return request.validate();
        }
        self.plan(&PlanRequest { max_tokens: 1, ..request.clone() }).map(drop)
    }

    /// Returns `true` if plans apply a transform of logits. The default is `false`: a loss that needs it is then refused, instead of
    /// computed without it.
    fn applies(&self, transform: LogitTransform) -> bool {
        let _ = transform;
        false
    }

    /// Returns `true` if planning compiles executables, which takes seconds: then plan once for the largest batch. Other backends can
    /// plan for each batch size.
    fn compiles(&self) -> bool {
        false
    }

    /// Returns the dtype to which dL/dlogits is rounded before it is multiplied into the gradients of hidden states and head, for inputs in
    /// `dtype`. It limits the precision of gradients ([`crate::parity::Tolerances::with_dlogits`]).
    fn dlogits(&self, dtype: Dtype) -> Dtype {
        let _ = dtype;
        Dtype::F32
    }
}

impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        (**self).plan(request)
    }

    fn check(&self, request: &PlanRequest) -> Result<()> {
        (**self).check(request)
    }

    fn applies(&self, transform: LogitTransform) -> bool {
        (**self).applies(transform)
    }

    fn compiles(&self) -> bool {
        (**self).compiles()
    }

    fn dlogits(&self, dtype: Dtype) -> Dtype {
        (**self).dlogits(dtype)
    }
}

/// The loss, planned for batches of one shape.
pub trait LossPlan: Send {
    /// Computes log-probabilities and entropies without gradients, for the old policy and the reference. Uses the same tiles
    /// and rounding as `value_and_grad`, so that an on-policy ratio is exactly 1.
    ///
    /// # Errors
    /// An error if shapes, dtypes or targets do not fit the plan.
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores>;

    /// Computes loss and metrics, and adds gradients to `grads`.
    ///
    /// # Errors
    /// The errors of [`LossPlan::score`], and [`Error::NoAdvantages`] for a batch without advantages. After an error `grads` is unchanged.
    /// Gradients on a device are lost if the device failed while it owned them; later uses of them return an error.
    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput>;

    /// Computes the loss like [`LossPlan::value_and_grad`], for logits `[N, V]` that it overwrites with dL/dlogits in their own dtype, 0 at
    /// masked
    /// tokens. No second `[N, V]` tensor is needed.
    ///
    /// # Errors
    /// The errors of [`LossPlan::value_and_grad`].
    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput>;

    /// Returns the bytes of inputs, outputs and workspace of one call at `max_tokens`.
    fn memory(&self) -> MemoryReport;
}

/// Factors by which the temperature T of a token enters: one of them is 1/T, the other 1.
///
/// logp = F_logp x log_softmax(logits x F_logits), with the logits after logit_scale and softcap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TemperatureFactors {
    /// Factor of logits, before the softmax.
    pub logits: f64,
    /// Factor of log-probabilities, after the softmax.
    pub logp: f64,
}

impl LossConfig {
    /// Returns the factors for the temperature of a token ([`TokenBatch::temperature`]), or for the configuration's.
    pub fn temperature_factors(&self, temperature: Option<f32>) -> TemperatureFactors {
        let by = 1.0 / temperature.map_or(self.temperature, f64::from);
        match self.temperature_mode() {
            TemperatureMode::ScaleLogits => TemperatureFactors { logits: by, logp: 1.0 },
            TemperatureMode::ScaleLogprobs => TemperatureFactors { logits: 1.0, logp: by },
        }
    }

    /// Returns 1/T of a row of `batch`, for scores and losses.
    pub fn reciprocal_temperature(&self, batch: &TokenBatch, row: usize) -> f64 {
        let TemperatureFactors { logits, logp } = self.temperature_factors(batch.temperature(row));
        // One of the two factors is 1.
        logits * logp
    }
}

impl LogitTransform {
    /// Checks that `backend` applies every transform that `config` and `batch` need. [`crate::PlanCache`] and [`crate::GrpoLoss`] call it;
    /// callers of [`Backend::plan`] call it themselves.
    ///
    /// # Errors
    /// [`Error::Unsupported`] that names the first missing transform.
    pub fn check(backend: &dyn Backend, config: &LossConfig, batch: Option<&TokenBatch>) -> Result<()> {
        let missing = Self::ALL.into_iter().find(|each| each.is_needed(config, batch) && !backend.applies(*each));
        missing.map_or(Ok(()), |missing| {
            Err(Error::Unsupported {
                backend: backend.name().to_owned(),
                what: missing.setting().to_owned(),
                instead: format!(
                    "leave it out; a backend that applies it returns true from Backend::applies({missing:?})"
                ),
            })
        })
    }
}
