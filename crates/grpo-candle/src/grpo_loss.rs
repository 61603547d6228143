//! The loss for candle models.

use crate::error::{Error, Result};
use crate::operand::{Operand, columns, dtype, same_dtype, vocabulary};
use crate::precomputed::Gradients;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use grpo_core::{
    Backend, CustomLoss, GradientSpec, Grads, GradsMut, HeadLayout, Implementation, LossConfig, LossOutput,
    MemoryReport, Metrics, PlanCache, PolicyInput, PolicySpec, Scores, TensorMut, Tiling, TokenBatch,
};
use std::sync::Arc;

/// The GRPO loss of a candle model, on any backend and with any implementation.
///
/// Sizes, dtype and trained tensors follow from the arguments of each call; a call with another shape, dtype or set of trained tensors
/// makes a new plan. Scores and losses of one plan have bit-identical log-probabilities, so an on-policy ratio is exactly 1: score a step
/// before its first loss, with the same tensors.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
/// use candle_core::{Device, Tensor, Var};
/// use grpo_candle::GrpoLoss;
/// use grpo_core::{LossConfig, TokenBatch};
///
/// let (n, h, v) = (4, 8, 32); // tokens, hidden size, vocabulary
/// let hidden = Tensor::randn(0f32, 1.0, (n, h), &Device::Cpu)?; // from your model
/// let lm_head = Var::randn(0f32, 0.1, (v, h), &Device::Cpu)?;
/// let grpo = GrpoLoss::builder(LossConfig::dapo().epsilon_high(0.28)).build(&CpuBackend::new())?;
///
/// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?.with_advantages(vec![1.0, -0.5])?;
/// let old = grpo.score(&hidden, &lm_head, None, &batch)?; // before the first update
/// let step = grpo.loss(&hidden, &lm_head, None, &batch.with_old_logp(old.logp)?)?;
/// let gradients = step.backward()?;
/// assert_eq!(gradients.get(&lm_head).map(|g| g.dims()), Some(&[v, h][..]));
/// assert!(step.metrics.value("entropy").is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GrpoLoss {
    plans: PlanCache,
    head_layout: HeadLayout,
}

/// The loss of one batch. Differentiate it with [`Loss::backward`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Loss {
    /// The scalar `[]`, f32, to scale or to add to other losses before `backward()`.
    pub loss: Tensor,
    /// The loss as the backend computed it.
    pub value: f64,
    /// The share of the policy term (TRL's `policy_loss`).
    pub policy_loss: f64,
    /// Log-probability and entropy per token, `[N]`.
    pub scores: Scores,
    /// TRL's metrics as sums that add up over micro-batches.
    pub metrics: Metrics,
    gradients: Gradients,
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

    /// Returns the bytes that a call needs under the current plan; `None` before the first call.
    pub fn memory(&self) -> Option<MemoryReport> {
        self.plans.memory()
    }

    /// Computes the loss of a batch from hidden states and LM head. Gradients are computed immediately, for the tensors that
    /// candle tracks; a frozen head needs no matrix product for its gradient.
    ///
    /// The same tensor may be embedding and head (tied embeddings); both gradients add up.
    ///
    /// # Shapes
    /// - hidden: `[N, H]` or `[B, T, H]` with B x T = N, f32 or bf16
    /// - lm_head: `[V, H]` or `[H, V]`, according to the head layout, of the same dtype; a frozen head may be bf16 with hidden
    ///   states in f32
    /// - bias: `[V]`, of the same dtype
    /// - loss: `[]`
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`] or [`Error::NotOnCpu`] for tensors that do not fit; [`Error::NotTracked`] if there is nothing to
    /// differentiate; [`Error::Loss`] from the backend.
    pub fn loss(&self, hidden: &Tensor, lm_head: &Tensor, bias: Option<&Tensor>, batch: &TokenBatch) -> Result<Loss> {
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
    pub fn loss_with(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        bias: Option<&Tensor>,
        batch: &TokenBatch,
        loss: impl FnOnce(&Scores) -> Result<CustomLoss>,
    ) -> Result<Loss> {
        self.differentiated(hidden, lm_head, bias, batch, |spec, wanted, policy, grads| {
            self.plans.step_with((spec, wanted), policy, batch, grads, loss)
        })
    }

    /// Makes the node of the loss that `step` computes.
    fn differentiated(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        bias: Option<&Tensor>,
        batch: &TokenBatch,
        step: impl FnOnce(PolicySpec, GradientSpec, PolicyInput<'_>, GradsMut<'_>) -> Result<LossOutput>,
    ) -> Result<Loss> {
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        let Some(wanted) = input.wanted() else {
            return Err(Error::NotTracked { tensors: "none of hidden, lm_head and bias" });
        };
        let mut gradients = Grads::zeros(input.spec, wanted, batch.tokens())?;
        let output = input.with_policy(|policy| step(input.spec, wanted, policy, gradients.as_mut()))?;
        let HiddenInput { hidden, lm_head, bias, .. } = input;
        let gradients = Gradients([
            Some(hidden.with_gradient(gradients.hidden)?),
            Some(lm_head.with_gradient(gradients.lm_head)?),
            bias.map(|bias| bias.with_gradient(gradients.bias)).transpose()?,
        ]);
        Ok(Loss::new(gradients, output)?)
    }

    /// Computes log-probabilities and entropies of a batch without gradients, for the old policy and the reference.
    ///
    /// # Shapes
    /// The shapes of [`GrpoLoss::loss`]; scores: `[N]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::loss`], except [`Error::NotTracked`].
    pub fn score(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        bias: Option<&Tensor>,
        batch: &TokenBatch,
    ) -> Result<Scores> {
        let input = HiddenInput::new(hidden, lm_head, bias, batch, self.head_layout)?;
        input.with_policy(|policy| {
            Ok(self.plans.with_plan(input.spec, input.wanted(), batch, |plan| plan.score(policy, batch))?)
        })
    }

    /// Computes the loss of a batch from logits that the model computed. With the logits of one step, their copy that becomes the gradient,
    /// and candle's own tensors, it needs several `[N, V]` tensors: [`GrpoLoss::loss`] needs none.
    ///
    /// # Shapes
    /// - logits: `[N, V]` or `[B, T, V]` with B x T = N, f32 or bf16
    /// - loss: `[]`
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::loss`].
    pub fn loss_from_logits(&self, logits: &Tensor, batch: &TokenBatch) -> Result<Loss> {
        let spec = logits_spec(logits, batch)?;
        if !logits.track_op() {
            return Err(Error::NotTracked { tensors: "no logits" });
        }
        let operand = Operand::new("logits", logits)?;
        let in_place = |logits: TensorMut<'_>| {
            self.plans.with_plan(spec, Some(GradientSpec::all(spec)), batch, |plan| {
                plan.value_and_grad_in_place(logits, batch)
            })
        };
        let (output, gradient) = operand.overwrite(in_place)?;
        Ok(Loss::new(Gradients([Some((operand.node, Some(gradient))), None, None]), output)?)
    }

    /// Computes log-probabilities and entropies of a batch from logits, without gradients.
    ///
    /// # Shapes
    /// The shapes of [`GrpoLoss::loss_from_logits`]; scores: `[N]`.
    ///
    /// # Errors
    /// The errors of [`GrpoLoss::score`].
    pub fn score_from_logits(&self, logits: &Tensor, batch: &TokenBatch) -> Result<Scores> {
        let spec = logits_spec(logits, batch)?;
        let operand = Operand::new("logits", logits)?;
        let locked = operand.lock();
        let policy = PolicyInput::Logits(locked.slice()?);
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

    /// Sets the layout of LM heads: `[V, H]` (embeddings, candle's `Linear`), the default, or `[H, V]`.
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
    fn new(gradients: Gradients, output: LossOutput) -> candle_core::Result<Self> {
        Ok(Self {
            loss: gradients.scalar(output.loss)?,
            value: output.loss,
            policy_loss: output.policy_loss,
            scores: output.scores,
            metrics: output.metrics,
            gradients,
        })
    }

    /// Returns the gradients of all variables, as `self.loss.backward()` does, with less time and memory: gradients of variables, usually
    /// of the head, are moved into the result. In the graph candle adds each of them to a tensor of zeros.
    ///
    /// # Errors
    /// The errors of candle in the backward pass of the model.
    pub fn backward(&self) -> Result<GradStore> {
        Ok(self.gradients.backward()?)
    }
}

/// Makes a batch from tensors of candle.
///
/// # Shapes
/// - targets: `[B, T]`, token ids as U32 or I64
/// - mask: `[B, T]`, U8 or any other dtype, 1 at completion tokens and 0 elsewhere
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let targets = Tensor::new(&[[3u32, 7, 0], [1, 0, 0]], &Device::Cpu)?;
/// let mask = Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?;
/// let batch = grpo_candle::token_batch(&targets, &mask)?;
/// assert_eq!((batch.sequences(), batch.active_tokens()), (2, 5));
/// # Ok::<(), grpo_candle::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for other shapes, [`Error::Candle`] for tensors that candle cannot convert, [`Error::Loss`] for a mask with other
/// numbers than 0 and 1.
pub fn token_batch(targets: &Tensor, mask: &Tensor) -> Result<TokenBatch> {
    let &[b, t] = targets.dims() else {
        return Err(Error::Shape { tensor: "targets", expected: "[B, T]".into(), found: targets.dims().to_vec() });
    };
    if mask.dims() != [b, t] {
        let expected = format!("[{b}, {t}], as targets");
        return Err(Error::Shape { tensor: "mask", expected, found: mask.dims().to_vec() });
    }
    let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mask = mask.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(TokenBatch::padded(&targets, &mask, [b, t])?)
}

/// Hidden states, head and bias, checked against the batch.
struct HiddenInput {
    hidden: Operand,
    lm_head: Operand,
    bias: Option<Operand>,
    spec: PolicySpec,
    tracked: GradientSpec,
}

impl HiddenInput {
    /// `layout` is the layout of `lm_head` as passed.
    fn new(
        hidden: &Tensor,
        lm_head: &Tensor,
        bias: Option<&Tensor>,
        batch: &TokenBatch,
        layout: HeadLayout,
    ) -> Result<Self> {
        let dtype = dtype("hidden", hidden)?;
        // A frozen head may be stored in bf16 with hidden states in f32.
        if lm_head.track_op() || lm_head.dtype() != DType::BF16 {
            same_dtype("lm_head", lm_head, dtype)?;
        }
        bias.map_or(Ok(()), |bias| same_dtype("bias", bias, dtype))?;
        let size = columns("hidden", hidden, batch.tokens())?;
        let vocab = vocabulary(lm_head, size, layout)?;
        if let Some(bias) = bias.filter(|bias| bias.dims() != [vocab]) {
            let expected = format!("[V] with V = {vocab}, as lm_head has");
            return Err(Error::Shape { tensor: "bias", expected, found: bias.dims().to_vec() });
        }
        let hidden = Operand::new("hidden", hidden)?;
        let (lm_head, layout) = Operand::head(lm_head, layout)?;
        let bias = bias.map(|bias| Operand::new("bias", bias)).transpose()?;
        let tracked = GradientSpec {
            hidden: hidden.is_tracked(),
            lm_head: lm_head.is_tracked(),
            bias: bias.as_ref().is_some_and(Operand::is_tracked),
        };
        let spec = PolicySpec::Hidden { hidden: size, vocab, dtype, layout, bias: bias.is_some() };
        Ok(Self { hidden, lm_head, bias, spec, tracked })
    }

    /// Returns the gradients to compute; `None` if candle tracks no tensor.
    fn wanted(&self) -> Option<GradientSpec> {
        let GradientSpec { hidden, lm_head, bias } = self.tracked;
        (hidden || lm_head || bias).then_some(self.tracked)
    }

    /// Calls `f` with the policy's output for the backend.
    fn with_policy<T>(&self, f: impl FnOnce(PolicyInput<'_>) -> Result<T>) -> Result<T> {
        let (hidden, lm_head, bias) = (self.hidden.lock(), self.lm_head.lock(), self.bias.as_ref().map(Operand::lock));
        f(PolicyInput::Hidden {
            hidden: hidden.slice()?,
            lm_head: lm_head.slice()?,
            bias: bias.as_ref().map(|bias| bias.slice()).transpose()?,
        })
    }
}

fn logits_spec(logits: &Tensor, batch: &TokenBatch) -> Result<PolicySpec> {
    Ok(PolicySpec::Logits { dtype: dtype("logits", logits)?, vocab: columns("logits", logits, batch.tokens())? })
}
