//! The losses of a micro-batch as differentiable burn tensors.

use crate::decoder::{EmbeddedRows, Routers, to_host};
use burn::tensor::{Tensor, TensorData};
use grpo_backend_cpu::CpuBackend;
use grpo_burn::GrpoLoss;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Backend, Dtype, Implementation, LossConfig, LossOutput, Scores, TokenBatch};
use grpo_models::ModelConfig;
use grpo_policy::{Error, Result, RouterStatistics, StepLoss};
use std::sync::Arc;

/// The loss of one micro-batch, a part of the step's loss.
pub(crate) struct PartialLoss {
    /// Tensor `[1]` whose gradient is the gradient of the loss.
    pub(crate) backward: Tensor<1>,
    /// Values of the loss; scores and metrics are empty if the loss has none.
    pub(crate) output: LossOutput,
    /// The use of experts.
    pub(crate) routers: RouterStatistics,
    /// The rows of a trained embedding, a leaf of the graph.
    pub(crate) embedded: Option<EmbeddedRows>,
}

impl PartialLoss {
    /// Adds the observed routers, and `factor` times their load balancing loss.
    pub(crate) fn with_routers(mut self, routers: Routers, factor: f64) -> Self {
        let (statistics, aux_loss) = routers.finish();
        if let Some((tensor, value)) = aux_loss {
            self.backward = self.backward + tensor.mul_scalar(factor as f32);
            self.output.loss += factor * value;
        }
        Self { routers: statistics, ..self }
    }

    /// Adds the value loss of `values: [N, 1]`.
    pub(crate) fn with_values(
        mut self,
        values: Tensor<2>,
        of_values: &ValueLossConfig,
        config: &LossConfig,
        batch: &TokenBatch,
    ) -> Result<Self> {
        let of_values = of_values.compute(&to_host(values.clone().inner()), config, batch)?;
        let (tokens, device) = (of_values.dvalues.len(), values.device());
        // The dot product of the values and the loss's derivatives has the gradient of the loss.
        let factors = Tensor::<2>::from_data(TensorData::new(of_values.dvalues, [tokens, 1]), &device);
        self.backward = self.backward + (values * factors).sum();
        self.output.loss += of_values.loss;
        self.output.value_loss += of_values.value_loss;
        self.output.metrics.merge(&of_values.metrics);
        Ok(self)
    }
}

/// The GRPO loss of a policy and its backend. The [crate documentation](crate) has an example.
#[derive(Clone)]
pub struct PolicyLoss {
    /// Configuration of the loss.
    pub config: Arc<LossConfig>,
    /// Backend that computes it.
    pub backend: Arc<dyn Backend>,
    /// Implementation that the backend uses.
    pub implementation: Implementation,
    /// Largest number of completion tokens of a micro-batch for which plans are reused. A larger micro-batch gets its own plan.
    pub max_tokens: usize,
}

impl PolicyLoss {
    /// Returns the cross-entropy with the targets, on the CPU with products in this dtype, for the batches of [`grpo_policy::imitation`].
    pub(crate) fn cross_entropy(products: Dtype) -> Self {
        let config = Arc::new(StepLoss::cross_entropy());
        let (backend, implementation) = (Arc::new(CpuBackend::new().with_products(products)), Implementation::Fused);
        // The number of tokens is not known yet.
        Self { config, backend, implementation, max_tokens: 0 }
    }

    /// Returns the loss with the softcap of a model's logits.
    ///
    /// # Errors
    /// See [`grpo_policy::loss_of_model`].
    pub(crate) fn of_model(self, model: &ModelConfig) -> Result<Self> {
        let config = grpo_policy::loss_of_model(&self.config, model)?.into();
        Ok(Self { config, ..self })
    }

    fn grpo(&self) -> Result<GrpoLoss> {
        let builder = GrpoLoss::builder(Arc::clone(&self.config));
        builder
            .implementation(self.implementation)
            .max_tokens(self.max_tokens)
            .build(&self.backend)
            .map_err(Error::other)
    }
}

/// A [`PolicyLoss`] with its plans, one per concurrent micro-batch.
pub(crate) struct PlannedLoss {
    of: PolicyLoss,
    grpo: GrpoLoss,
}

impl PlannedLoss {
    pub(crate) fn new(of: PolicyLoss) -> Result<Self> {
        Ok(Self { grpo: of.grpo()?, of })
    }

    /// Returns the configuration of the loss.
    pub(crate) fn config(&self) -> &LossConfig {
        &self.of.config
    }

    /// Computes the loss of the batch's targets, from `hidden: [N, H]` and `lm_head: [V, H]`.
    pub(crate) fn loss(&self, hidden: Tensor<2>, lm_head: Tensor<2>, batch: &TokenBatch) -> Result<PartialLoss> {
        let grpo_burn::Loss { loss, value, policy_loss, scores, metrics, .. } =
            self.with_loss(batch, |grpo| grpo.loss(hidden, lm_head, None, batch))?;
        Ok(PartialLoss {
            backward: loss,
            output: LossOutput::new(value, policy_loss, scores, metrics),
            routers: RouterStatistics::default(),
            embedded: None,
        })
    }

    /// Returns log-probabilities and entropies `[N]` of the batch's targets, without gradients. For equal hidden states they equal those of
    /// [`PlannedLoss::loss`] on the same micro-batch.
    pub(crate) fn score(&self, hidden: Tensor<2>, lm_head: Tensor<2>, batch: &TokenBatch) -> Result<Scores> {
        self.with_loss(batch, |grpo| grpo.score(hidden, lm_head, None, batch))
    }

    /// Calls `f` with the loss. A micro-batch that is too large for its plans gets its own.
    fn with_loss<T>(&self, batch: &TokenBatch, f: impl FnOnce(&GrpoLoss) -> grpo_burn::Result<T>) -> Result<T> {
        if batch.tokens() <= self.of.max_tokens { f(&self.grpo) } else { f(&self.of.grpo()?) }.map_err(Error::other)
    }
}
