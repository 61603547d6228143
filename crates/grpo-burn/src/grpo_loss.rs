//! The loss for burn models.

use crate::custom_op::Graph;
use crate::error::{Error, Result};
use crate::input::{HiddenInput, LogitsInput};
use crate::operand::{adopt, slice, whole};
use crate::record;
use burn::tensor::{Tensor, bf16};
use grpo_core::{
    Backend, Dtype, GradientSpec, Grads, HeadLayout, Implementation, LossConfig, LossOutput, MemoryReport, Metrics,
    PolicyInput, PolicySpec, Scores, TensorMut, Tiling, TokenBatch,
};
use std::sync::Arc;

/// The GRPO loss of a burn model, on any backend and with any implementation.
///
/// It wraps a [`grpo_core::GrpoLoss`] whose sizes, dtype and trained tensors follow from the arguments of each call; a call with another
/// shape, dtype or set of trained tensors builds a new one. Scores and losses of one plan have bit-identical log-probabilities, so
/// an on-policy ratio is exactly 1: score a step before its first loss, with the same tensors.
///
/// ```no_run
/// # fn run(backend: std::sync::Arc<dyn grpo_core::Backend>, hidden: burn::tensor::Tensor<3>,
/// #     lm_head: burn::tensor::Tensor<2>, batch: grpo_core::TokenBatch) -> Result<(), grpo_burn::Error> {
/// let mut grpo = grpo_burn::GrpoLoss::new(backend, grpo_core::LossConfig::default())?;
/// let step = grpo.loss(hidden, lm_head, None, &batch)?;
/// let gradients = step.loss.backward();
/// # Ok(()) }
/// ```
pub struct GrpoLoss {
    backend: Arc<dyn Backend>,
    config: Arc<LossConfig>,
    implementation: Implementation,
    tiling: Tiling,
    head_layout: HeadLayout,
    max_tokens: usize,
    /// The loss for the most recent tensors.
    built: Option<grpo_core::GrpoLoss>,
}

/// The loss of one batch.
#[derive(Debug)]
pub struct Loss {
    /// The scalar `[1]`, f32, on which to call `backward()`. It may be scaled and added to other losses first.
    pub loss: Tensor<1>,
    /// The loss as the backend computed it.
    pub value: f64,
    /// The share of the policy term (TRL's `policy_loss`).
    pub policy_loss: f64,
    /// Log-probability and entropy per token, `[N]`.
    pub scores: Scores,
    /// TRL's metrics as sums that add up over micro-batches.
    pub metrics: Metrics,
}

impl GrpoLoss {
    /// Creates a loss with the default implementation (fused), tiling and head layout (`[V, H]`).
    ///
    /// # Errors
    /// [`Error::Loss`] for an illegal configuration.
    pub fn new(backend: Arc<dyn Backend>, config: impl Into<Arc<LossConfig>>) -> Result<Self> {
        let config = config.into();
        config.validate()?;
        Ok(Self {
            backend,
            config,
            implementation: Implementation::default(),
            tiling: Tiling::default(),
            head_layout: HeadLayout::default(),
            max_tokens: 1,
            built: None,
        })
    }

    /// Sets the implementation. It changes time and memory, and numbers only within tolerance.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self.built = None;
        self
    }

    /// Sets tile sizes and the workspace budget.
    #[must_use]
    pub fn with_tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self.built = None;
        self
    }

    /// Sets the layout of LM heads: `[V, H]` (embeddings) or `[H, V]` (burn's `Linear`).
    #[must_use]
    pub fn with_head_layout(mut self, layout: HeadLayout) -> Self {
        self.head_layout = layout;
        self.built = None;
        self
    }

    /// Plans for at least `tokens` tokens N from the start, so that growing batches cause no new plans.
    #[must_use]
    pub fn with_max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self.built = None;
        self
    }

    /// Returns the configuration of the loss.
    pub fn config(&self) -> &LossConfig {
        &self.config
    }

    /// Returns the implementation.
    pub fn implementation(&self) -> Implementation {
        self.implementation
    }

    /// Returns the name of the backend.
    pub fn backend(&self) -> &str {
        self.backend.name()
    }

    /// Returns the bytes that a call needs under the current plan; `None` before the first call.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.built.as_ref()?.memory()
    }

    /// Computes the loss of a batch from hidden states and LM head. Gradients are computed immediately, for the tensors that
    /// autodiff tracks; a frozen head needs no matrix product for its gradient.
    ///
    /// The same tensor may be embedding and head (tied embeddings); both gradients add up.
    ///
    /// # Shapes
    /// - hidden: `[N, H]` or `[B, T, H]` with B x T = N, f32 or bf16
    /// - lm_head: `[V, H]` or `[H, V]`, according to the head layout, of the same dtype; a frozen head may be bf16 with hidden
    ///   states in f32
    /// - bias: `[V]`, of the same dtype
    /// - loss: `[1]`
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`], [`Error::NotFlex`] or [`Error::Checkpointing`] for tensors that do not fit;
    /// [`Error::NotTracked`] if there is nothing to differentiate; [`Error::Loss`] from the backend.
    pub fn loss<const D: usize>(
        &mut self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
    ) -> Result<Loss> {
        let graph = Graph::default().join("hidden", &hidden)?.join("lm_head", &lm_head)?;
        let graph = bias.iter().try_fold(graph, |g, b| g.join("bias", b))?;
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        let Some(wanted) = input.wanted() else {
            return Err(Error::NotTracked { tensors: "none of hidden, lm_head and bias" });
        };
        let (output, made) = self.built(input.spec, Some(wanted), batch)?.step_owned(input.policy()?, batch)?;
        let gradients = [
            made.hidden.map(|g| adopt(g, &input.hidden.storage)),
            made.lm_head.map(|g| input.head.gradient(g)),
            made.bias.map(|g| adopt(g, &input.bias.storage)),
        ];
        let parents = [input.hidden.node, input.head_node, input.bias.node];
        Ok(Loss::new(record::scalar(graph, output.loss, parents, gradients), output))
    }

    /// Computes log-probabilities and entropies of a batch without gradients, for the old policy and the reference. Tensors
    /// may be on an autodiff device or not.
    ///
    /// # Shapes
    /// The shapes of [`GrpoLoss::loss`]; scores: `[N]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::loss`], except [`Error::NotTracked`].
    pub fn score<const D: usize>(
        &mut self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        Ok(self.built(input.spec, input.wanted(), batch)?.score_policy(input.policy()?, batch)?)
    }

    /// Computes the loss of a batch from logits that the model computed.
    ///
    /// Logits that are passed by value and whose storage is not shared are overwritten with their gradient, which saves a second
    /// `[N, V]` tensor. If the caller keeps a clone, the clone does not change.
    ///
    /// # Shapes
    /// - logits: `[N, V]` or `[B, T, V]` with B x T = N, f32 or bf16
    /// - loss: `[1]`
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::loss`].
    pub fn loss_from_logits<const D: usize>(&mut self, logits: Tensor<D>, batch: &TokenBatch) -> Result<Loss> {
        let graph = Graph::default().join("logits", &logits)?;
        let LogitsInput { mut logits, spec } = LogitsInput::new(logits, batch)?;
        if !logits.tracked {
            return Err(Error::NotTracked { tensors: "no logits" });
        }
        let built = self.built(spec, Some(LOGITS_GRADIENT), batch)?;
        let in_place = match spec.dtype() {
            Dtype::F32 => whole::<f32>(&mut logits.storage).map(TensorMut::from),
            Dtype::Bf16 => whole::<bf16>(&mut logits.storage).map(TensorMut::from),
        };
        let (output, gradient) = match in_place {
            Some(storage) => {
                let output = built.step_logits_in_place(storage, batch)?;
                (output, logits.storage)
            }
            None => {
                let mut gradient = vec![0.0f32; logits.storage.layout().num_elements()];
                let policy = PolicyInput::Logits(slice("logits", &logits.storage)?);
                let output = built.step_policy(policy, batch, Grads::of_logits(&mut gradient))?;
                (output, adopt(gradient, &logits.storage))
            }
        };
        Ok(Loss::new(record::scalar(graph, output.loss, [logits.node], [Some(gradient)]), output))
    }

    /// Computes log-probabilities and entropies of a batch from logits, without gradients.
    ///
    /// # Shapes
    /// The shapes of [`GrpoLoss::loss_from_logits`]; scores: `[N]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::score`].
    pub fn score_from_logits<const D: usize>(&mut self, logits: Tensor<D>, batch: &TokenBatch) -> Result<Scores> {
        let LogitsInput { logits, spec } = LogitsInput::new(logits, batch)?;
        let built = self.built(spec, Some(LOGITS_GRADIENT), batch)?;
        Ok(built.score_policy(PolicyInput::Logits(slice("logits", &logits.storage)?), batch)?)
    }

    /// Returns the loss for these shapes, which plans again for larger batches. With `gradients` = `None` (scores) the current loss is
    /// reused with any gradients, because a separate plan might round in another order than the loss.
    fn built(
        &mut self,
        policy: PolicySpec,
        gradients: Option<GradientSpec>,
        batch: &TokenBatch,
    ) -> Result<&grpo_core::GrpoLoss> {
        let usable = |built: &grpo_core::GrpoLoss| {
            built.policy() == policy && gradients.is_none_or(|gradients| gradients == built.gradients())
        };
        // Large batches tend to recur: a smaller shape does not shrink the plan.
        let seen = self.built.as_ref().map_or(0, grpo_core::GrpoLoss::max_tokens);
        let built = match self.built.take().filter(usable) {
            Some(built) => built,
            None => grpo_core::GrpoLoss::builder(Arc::clone(&self.config))
                .policy(policy)
                .gradients(gradients.unwrap_or_else(|| every_gradient(policy)))
                .implementation(self.implementation)
                .tiling(self.tiling.clone())
                .max_tokens(self.max_tokens.max(seen).max(batch.tokens()))
                .build(&self.backend)?,
        };
        Ok(self.built.insert(built))
    }
}

impl std::fmt::Debug for GrpoLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrpoLoss")
            .field("backend", &self.backend.name())
            .field("config", &self.config)
            .field("implementation", &self.implementation)
            .field("tiling", &self.tiling)
            .field("head_layout", &self.head_layout)
            .field("max_tokens", &self.max_tokens)
            .finish_non_exhaustive()
    }
}

impl Loss {
    fn new(loss: Tensor<1>, output: LossOutput) -> Self {
        Self {
            loss,
            value: output.loss,
            policy_loss: output.policy_loss,
            scores: output.scores,
            metrics: output.metrics,
        }
    }
}

const LOGITS_GRADIENT: GradientSpec = GradientSpec { hidden: true, lm_head: false, bias: false };

fn every_gradient(policy: PolicySpec) -> GradientSpec {
    match policy {
        PolicySpec::Logits { .. } => LOGITS_GRADIENT,
        PolicySpec::Hidden { bias, .. } => GradientSpec { hidden: true, lm_head: true, bias },
    }
}
