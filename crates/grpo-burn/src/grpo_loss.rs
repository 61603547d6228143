//! The loss for burn models.

use crate::custom_op::{Derivative, Graph, record};
use crate::error::{Error, Result};
use crate::input::{HiddenInput, LogitsInput};
use crate::operand::{adopt, elements, whole};
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, Scalar};
use burn::tensor::{Tensor, TensorData, bf16};
use grpo_core::{
    Backend, CustomLoss, Dtype, GradientSpec, Grads, GradsMut, HeadLayout, Implementation, LossConfig, LossOutput,
    MemoryReport, Metrics, PlanCache, PolicyInput, PolicySpec, Scores, TensorMut, Tiling, TokenBatch,
};
use std::sync::Arc;

/// The GRPO loss of a burn model, on any backend and with any implementation.
///
/// Sizes, dtype and trained tensors follow from the arguments of each call; a call with another shape, dtype or set of trained tensors
/// makes a new plan. Scores and losses of one plan have bit-identical log-probabilities, so an on-policy ratio is exactly 1: score a step
/// before its first loss, with the same tensors.
///
/// Threads may share one loss: each concurrent call has its own plan, which later calls reuse.
///
/// ```no_run
/// # fn run(hidden: burn::tensor::Tensor<3>, lm_head: burn::tensor::Tensor<2>, batch: grpo_core::TokenBatch)
/// # -> Result<(), grpo_burn::Error> {
/// let grpo = grpo_burn::GrpoLoss::builder(grpo_core::LossConfig::default()).build(&grpo_backend_cpu::CpuBackend::new())?;
/// let step = grpo.loss(hidden, lm_head, None, &batch)?;
/// let gradients = step.loss.backward();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct GrpoLoss {
    plans: PlanCache,
    head_layout: HeadLayout,
}

/// The loss of one batch.
#[derive(Debug)]
#[non_exhaustive]
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
    /// Starts a builder for a loss of `config`.
    pub fn builder(config: impl Into<Arc<LossConfig>>) -> GrpoLossBuilder {
        GrpoLossBuilder {
            config: config.into(),
            implementation: None,
            tiling: Tiling::default(),
            max_tokens: 0,
            head_layout: HeadLayout::default(),
        }
    }

    /// Returns the configuration of the loss.
    pub fn config(&self) -> &LossConfig {
        self.plans.config()
    }

    /// Returns the implementation for hidden states.
    pub fn implementation(&self) -> Implementation {
        self.plans.implementation().unwrap_or_default()
    }

    /// Returns the name of the backend.
    pub fn backend(&self) -> &str {
        self.plans.backend().name()
    }

    /// Returns the bytes that a call needs under the current plan; `None` before the first call.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.plans.memory()
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
        &self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
    ) -> Result<Loss> {
        self.differentiated(hidden, lm_head, bias, batch, |spec, wanted, policy, grads| {
            Ok(self.plans.with_plan(spec, Some(wanted), batch, |plan| plan.value_and_grad(policy, batch, grads))?)
        })
    }

    /// Computes a loss of the caller from hidden states and LM head: `loss` returns the loss and its derivatives for the scores of the batch.
    /// Of the configuration, only temperature, logit scale and softcap apply. Costs one forward pass of the head more than
    /// [`GrpoLoss::loss`], whose shapes it has.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::loss`] and of `loss`.
    pub fn loss_with<const D: usize>(
        &self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
        loss: impl FnOnce(&Scores) -> Result<CustomLoss>,
    ) -> Result<Loss> {
        self.differentiated(hidden, lm_head, bias, batch, |spec, wanted, policy, grads| {
            self.plans.step_with((spec, wanted), policy, batch, grads, loss)
        })
    }

    /// Records the loss that `step` computes.
    fn differentiated<const D: usize>(
        &self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
        step: impl FnOnce(PolicySpec, GradientSpec, PolicyInput<'_>, GradsMut<'_>) -> Result<LossOutput>,
    ) -> Result<Loss> {
        let graph = Graph::default().join("hidden", &hidden)?.join("lm_head", &lm_head)?;
        let graph = bias.iter().try_fold(graph, |g, b| g.join("bias", b))?;
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        let Some(wanted) = input.wanted() else {
            return Err(Error::NotTracked { tensors: "none of hidden, lm_head and bias" });
        };
        let mut made = Grads::zeros(input.spec, wanted, batch.tokens())?;
        let output = step(input.spec, wanted, input.policy()?, made.as_mut())?;
        let gradients = [
            made.hidden.map(|g| adopt(g, &input.hidden.storage)),
            made.lm_head.map(|g| input.head.gradient(g)),
            made.bias.map(|g| adopt(g, &input.bias.storage)),
        ];
        let parents = [input.hidden.node, input.head_node, input.bias.node];
        Ok(Loss::new(graph, parents, gradients, output))
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
        &self,
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        let policy = input.policy()?;
        Ok(self.plans.with_plan(input.spec, input.wanted(), batch, |plan| plan.score(policy, batch))?)
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
    pub fn loss_from_logits<const D: usize>(&self, logits: Tensor<D>, batch: &TokenBatch) -> Result<Loss> {
        let graph = Graph::default().join("logits", &logits)?;
        let LogitsInput { mut logits, spec } = LogitsInput::new(logits, batch)?;
        if !logits.tracked {
            return Err(Error::NotTracked { tensors: "no logits" });
        }
        let wanted = Some(GradientSpec::all(spec));
        let in_place = match spec.dtype() {
            Dtype::F32 => whole::<f32>(&mut logits.storage).map(TensorMut::from),
            Dtype::Bf16 => whole::<bf16>(&mut logits.storage).map(TensorMut::from),
        };
        let (output, gradient) = match in_place {
            Some(storage) => {
                let output =
                    self.plans.with_plan(spec, wanted, batch, |plan| plan.value_and_grad_in_place(storage, batch))?;
                (output, logits.storage)
            }
            None => {
                let mut gradient = vec![0.0f32; logits.storage.layout().num_elements()];
                let policy = PolicyInput::Logits(elements("logits", &logits.storage)?);
                let grads = Grads::of_logits(&mut gradient);
                let output =
                    self.plans.with_plan(spec, wanted, batch, |plan| plan.value_and_grad(policy, batch, grads))?;
                (output, adopt(gradient, &logits.storage))
            }
        };
        Ok(Loss::new(graph, [logits.node], [Some(gradient)], output))
    }

    /// Computes log-probabilities and entropies of a batch from logits, without gradients.
    ///
    /// # Shapes
    /// The shapes of [`GrpoLoss::loss_from_logits`]; scores: `[N]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::score`].
    pub fn score_from_logits<const D: usize>(&self, logits: Tensor<D>, batch: &TokenBatch) -> Result<Scores> {
        let LogitsInput { logits, spec } = LogitsInput::new(logits, batch)?;
        let policy = PolicyInput::Logits(elements("logits", &logits.storage)?);
        Ok(self.plans.with_plan(spec, None, batch, |plan| plan.score(policy, batch))?)
    }
}

/// The builder of a [`GrpoLoss`].
#[derive(Clone, Debug)]
#[must_use]
pub struct GrpoLossBuilder {
    config: Arc<LossConfig>,
    implementation: Option<Implementation>,
    tiling: Tiling,
    max_tokens: usize,
    head_layout: HeadLayout,
}

impl GrpoLossBuilder {
    /// Sets the implementation; default `fused` for hidden states, `logits` for logits. It changes time and memory, and numbers only within
    /// tolerance.
    pub fn implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = Some(implementation);
        self
    }

    /// Sets tile sizes, the workspace budget and the memory limit.
    pub fn tiling(mut self, tiling: Tiling) -> Self {
        self.tiling = tiling;
        self
    }

    /// Sets the layout of LM heads: `[V, H]` (embeddings), the default, or `[H, V]` (burn's `Linear`).
    pub fn head_layout(mut self, layout: HeadLayout) -> Self {
        self.head_layout = layout;
        self
    }

    /// Plans for at least `tokens` tokens N from the start, so that growing batches cause no new plans.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Builds the loss on a clone of `backend`; an `Arc` of a backend is a backend, too.
    ///
    /// # Errors
    /// [`Error::Loss`] for an illegal configuration, or one that needs a transform of logits that the backend does not apply.
    pub fn build<B: Backend + Clone + 'static>(self, backend: &B) -> Result<GrpoLoss> {
        let Self { config, implementation, tiling, max_tokens, head_layout } = self;
        let plans = PlanCache::new(Arc::new(backend.clone()), config)?.with_tiling(tiling).with_max_tokens(max_tokens);
        let plans = match implementation {
            Some(implementation) => plans.with_implementation(implementation),
            None => plans,
        };
        Ok(GrpoLoss { plans, head_layout })
    }
}

impl Loss {
    /// Records the loss of `output` as a function of `parents`, with `gradients` as its derivative; `None` for an untracked parent. Every
    /// gradient has the dtype of its parent, because burn adds gradients of one tensor without checking dtypes.
    fn new<const N: usize>(
        graph: Graph,
        parents: [NodeGuard; N],
        gradients: [Option<FlexTensor>; N],
        output: LossOutput,
    ) -> Self {
        let value = FlexTensor::from_data(TensorData::from([output.loss as f32]));
        Self {
            loss: record(graph, value, parents, Precomputed(gradients)),
            value: output.loss,
            policy_loss: output.policy_loss,
            scores: output.scores,
            metrics: output.metrics,
        }
    }
}

/// The derivative of the loss: each tensor's gradient times the gradient of the scalar.
#[derive(Clone, Debug)]
struct Precomputed<const N: usize>([Option<FlexTensor>; N]);

impl<const N: usize> Derivative<N> for Precomputed<N> {
    fn gradients(self, upstream: FlexTensor, _: [bool; N]) -> [Option<FlexTensor>; N] {
        let factor: f64 = upstream.into_data().iter::<f64>().sum();
        // In the usual case, `loss.backward()`, the buffers are returned without a copy.
        let scaled = |g| if factor == 1.0 { g } else { Flex::float_mul_scalar(g, Scalar::from(factor)) };
        self.0.map(|gradient| gradient.map(scaled))
    }
}
