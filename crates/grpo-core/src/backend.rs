//! The seam between the loss and what computes it.
//!
//! A [`Backend`] turns a [`PlanRequest`] into a [`LossPlan`] once; the plan is then called for every micro-batch.
//! Whatever computes the loss is, to the rest of the system, a machine that yields per-token logp and entropy and takes
//! dL/dlogp and dL/dentropy; it knows nothing of clipping, KL or advantages.
//!
//! Legend: N tokens (rows), H hidden size, V vocabulary. All host tensors are contiguous and row-major.

use crate::batch::{PolicyValues, TokenBatch};
use crate::config::{LossConfig, TemperatureMode};
use crate::error::{Error, Result};
use crate::gradients::{GradientSpec, GradsMut};
use crate::memory_report::MemoryReport;
use crate::metrics::Metrics;
use crate::policy::{PolicyInput, PolicySpec};
use crate::tensor::{Dtype, TensorMut};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use strum::{EnumCount, EnumString, IntoStaticStr, VariantArray};

/// How the loss is computed. Swapping one for another changes time and memory, never the numbers beyond tolerance.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    EnumCount,
    EnumString,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Implementation {
    /// Dense and obvious; holds [N, V] logits and their gradient.
    Reference,
    /// Tiled over given logits. Hidden-state input is accepted and materialises [N, V] logits first.
    Logits,
    /// Hidden states x LM head, tile by tile; never holds an [N, V] tensor.
    #[default]
    Fused,
}

impl Implementation {
    /// All of them.
    pub const ALL: [Self; Self::COUNT] = *Self::VARIANTS.first_chunk().unwrap();

    /// The implementation called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    /// The name used in configuration and reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Order of the fused loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoopOrder {
    /// Chunks of tokens against the whole vocabulary: three products, the head is streamed once per chunk.
    TokenChunks,
    /// Panels of the vocabulary against all tokens: logits are recomputed (four products), the head is streamed twice.
    VocabPanels,
}

/// Sizes that trade time for memory. `None` lets the plan choose.
///
/// ```
/// use grpo_core::Tiling;
///
/// // 32 MiB of workspace, and at most 8 GiB for a call in all.
/// let tiling = Tiling { workspace_budget: 32 << 20, memory_limit: Some(8 << 30), ..Tiling::default() };
/// assert_eq!(tiling.token_chunk, None);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tiling {
    /// Most bytes of workspace beside inputs, outputs and gradients. The fused plan chooses its blocking to fit.
    pub workspace_budget: usize,
    /// Tokens per tile. Gradients of the head are summed over tiles, so their last bits follow this size; give it where
    /// they must not depend on what else the plan looks at (the budget, the number of threads).
    pub token_chunk: Option<usize>,
    /// Vocabulary entries per tile.
    pub vocab_block: Option<usize>,
    /// Order of the fused loops.
    pub loop_order: Option<LoopOrder>,
    /// Most bytes that a call may need in all: inputs, outputs and workspace ([`MemoryReport::total`]). A plan that needs
    /// more is refused before anything is allocated. `None` is the machine's memory on a CPU, and no limit on a device.
    pub memory_limit: Option<usize>,
}

impl Default for Tiling {
    fn default() -> Self {
        Self { workspace_budget: 128 << 20, token_chunk: None, vocab_block: None, loop_order: None, memory_limit: None }
    }
}

/// Everything a backend needs to know before the first batch.
/// [`GrpoLoss`](crate::GrpoLoss) makes it for its callers; it is the layer below, for authors of backends and of wrappers.
///
/// ```
/// use backend_cpu::CpuBackend;
/// use grpo_core::{
///     Backend, Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicyInput, PolicySpec, Tiling,
///     TokenBatch,
/// };
///
/// let request = PlanRequest {
///     loss: LossConfig::default(),
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
    /// What the loss is.
    pub loss: LossConfig,
    /// How it is computed.
    pub implementation: Implementation,
    /// How tiles trade memory for time.
    pub tiling: Tiling,
    /// Most tokens N of any batch; smaller batches are fine.
    pub max_tokens: usize,
    /// Shapes and dtypes of the policy's output.
    pub policy: PolicySpec,
    /// Gradients to make.
    pub gradients: GradientSpec,
}

/// Per-token results, in nats; 0 at masked tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Log-probability of the target `[N]`.
    pub logp: Vec<f32>,
    /// Entropy of the distribution it was drawn from `[N]`.
    pub entropy: Vec<f32>,
}

impl From<Scores> for PolicyValues {
    fn from(scores: Scores) -> Self {
        let widened = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        Self { logp: widened(scores.logp), entropy: widened(scores.entropy) }
    }
}

impl Scores {
    /// Checks that every active token of `batch` has a log-probability and an entropy that are finite.
    ///
    /// # Errors
    /// [`Error::Value`] that names the first token that has not, with its sequence and its position in it;
    /// [`Error::Shape`] for scores of another batch.
    pub fn check_finite(&self, batch: &TokenBatch) -> Result<()> {
        batch.check_computed("logp", &self.logp)?;
        batch.check_computed("entropy", &self.entropy)
    }
}

/// The result of one `value_and_grad`.
#[derive(Clone, Debug, Default)]
pub struct LossOutput {
    /// Sum over tokens of weight x token loss. Micro-batches of one step add up.
    pub loss: f64,
    /// The part of it that is the policy term's (TRL's `policy_loss`).
    pub policy_loss: f64,
    /// The mean value loss, before its coefficient, where whoever computes the loss also trains a value function
    /// ([`crate::objective::ValueLossConfig`]): with its coefficient it is a part of `loss`. Else 0.
    pub value_loss: f64,
    /// What the forward pass saw at the active tokens of the batch, also at those that the configuration leaves out of the
    /// loss: log-probabilities bit for bit what `score` returns for the same input, entropies too
    /// where no compiler orders the operations.
    pub scores: Scores,
    /// TRL's metrics as mergeable sums.
    pub metrics: Metrics,
}

impl LossOutput {
    /// Checks that the policy's output was finite where it counts, and the loss with it.
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

/// Something that computes the loss.
pub trait Backend: Send + Sync {
    /// `cpu`, `pjrt:tpu`, ...
    fn name(&self) -> &str;

    /// Validates the request, chooses tiles, allocates or compiles.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a combination this backend does not offer, [`Error::Budget`] when the workspace
    /// budget cannot be met, [`Error::Config`] or [`Error::Shape`] for an illegal request.
    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>>;

    /// Whether a plan of other shapes costs seconds, because programs are compiled for it: then plan once for the largest
    /// batch. The others may be planned for as they come.
    fn compiles(&self) -> bool {
        false
    }

    /// What dL/dlogits is rounded to before it is multiplied into the gradients of hidden states and head, given inputs in
    /// `dtype`: how close to the truth gradients can be ([`crate::parity::Tolerances::with_dlogits`]).
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

    fn compiles(&self) -> bool {
        (**self).compiles()
    }

    fn dlogits(&self, dtype: Dtype) -> Dtype {
        (**self).dlogits(dtype)
    }
}

/// The loss, ready for batches of one shape.
pub trait LossPlan: Send {
    /// Log-probabilities and entropies without gradients, for old-policy and reference scoring. Uses the same tiles
    /// and rounding as `value_and_grad`, so that an on-policy ratio is exactly 1.
    ///
    /// # Errors
    /// When shapes, dtypes or targets do not fit the plan.
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores>;

    /// Loss, metrics, and gradients added into `grads`.
    ///
    /// # Errors
    /// As [`LossPlan::score`], and [`Error::NoAdvantages`] for a batch without advantages; nothing has been written to `grads` then, but gradients on a device that failed while it
    /// owned them are lost, and say so when they are used.
    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput>;

    /// The same for logits `[N, V]` that the call overwrites with dL/dlogits, in their own dtype and 0 at masked tokens:
    /// nobody holds a second `[N, V]` tensor.
    ///
    /// # Errors
    /// As [`LossPlan::value_and_grad`].
    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput>;

    /// Bytes of inputs, outputs and workspace of one call at `max_tokens`.
    fn memory(&self) -> MemoryReport;
}

/// What the temperature T of a token multiplies: one of the two by 1/T, the other by 1.
///
/// logp = logp x log_softmax(logits x w), with w the token's logits after logit_scale and softcap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TemperatureFactors {
    /// Of logits, before the softmax.
    pub logits: f64,
    /// Of log-probabilities, after it.
    pub logp: f64,
}

impl LossConfig {
    /// The factors of a token whose temperature is `temperature` ([`TokenBatch::temperature`]), or the configuration's.
    pub fn temperature_factors(&self, temperature: Option<f32>) -> TemperatureFactors {
        let by = 1.0 / temperature.map_or(self.temperature, f64::from);
        match self.temperature_mode() {
            TemperatureMode::ScaleLogits => TemperatureFactors { logits: by, logp: 1.0 },
            TemperatureMode::ScaleLogprobs => TemperatureFactors { logits: 1.0, logp: by },
        }
    }

    /// 1/T of a row of `batch`, the same for scores and losses.
    pub fn reciprocal_temperature(&self, batch: &TokenBatch, row: usize) -> f64 {
        let TemperatureFactors { logits, logp } = self.temperature_factors(batch.temperature(row));
        // One of them is 1.
        logits * logp
    }
}
