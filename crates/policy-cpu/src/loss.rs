//! The losses of a micro-batch as differentiable burn tensors.

use crate::decoder::to_host;
use backend_cpu::CpuBackend;
use burn::tensor::{Tensor, TensorData};
use grpo_burn::GrpoLoss;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Backend, Implementation, LossConfig, LossOutput, Scores, TokenBatch};
use policy::{Error, Result, StepLoss};
use std::sync::Arc;

/// The loss of one micro-batch, a part of the step's loss.
pub(crate) struct PartialLoss {
    /// Tensor `[1]` whose gradient is the gradient of the loss.
    pub(crate) backward: Tensor<1>,
    /// Values of the loss; scores and metrics are empty if the loss has none.
    pub(crate) output: LossOutput,
}

impl PartialLoss {
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

/// The GRPO loss of a policy and its backend.
///
/// ```
/// # fn example(backend: std::sync::Arc<dyn grpo_core::Backend>) {
/// let loss = policy_cpu::PolicyLoss {
///     config: grpo_core::LossConfig::default().into(),
///     backend,
///     implementation: grpo_core::Implementation::Fused,
///     max_tokens: 512,
/// };
/// # drop(loss);
/// # }
/// ```
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
    /// Returns the cross-entropy with the targets, on the CPU, for the batches of [`policy::imitation`].
    pub(crate) fn cross_entropy() -> Self {
        let config = Arc::new(StepLoss::cross_entropy());
        let (backend, implementation) = (Arc::new(CpuBackend::new()), Implementation::Fused);
        // The number of tokens is not known yet.
        Self { config, backend, implementation, max_tokens: 0 }
    }

    fn grpo(&self) -> Result<GrpoLoss> {
        let grpo = GrpoLoss::new(Arc::clone(&self.backend), Arc::clone(&self.config)).map_err(Error::other)?;
        Ok(grpo.with_implementation(self.implementation).with_max_tokens(self.max_tokens))
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
        let grpo_burn::Loss { loss, value, policy_loss, scores, metrics } =
            self.with_loss(batch, |grpo| grpo.loss(hidden, lm_head, None, batch))?;
        Ok(PartialLoss {
            backward: loss,
            output: LossOutput { loss: value, policy_loss, scores, metrics, value_loss: 0.0 },
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::Decoder;
    use crate::gradients::GradientSum;
    use crate::sequences::completion_hidden;
    use burn::tensor::activation::log_softmax;
    use burn::tensor::{Device, Int};
    use grpo_core::Advantages;
    use models::ModelConfig;
    use policy::{Sequence, imitation, token_batch};

    fn sequences() -> Vec<Sequence> {
        vec![
            Sequence { prompt: vec![1, 5, 6], completion: vec![7, 2] },
            Sequence { prompt: vec![1, 9], completion: vec![8, 10, 2] },
        ]
    }

    /// Returns log-probabilities `[N, 1]` of the batch's targets, in plain burn operations.
    fn target_logp(hidden: Tensor<2>, lm_head: Tensor<2>, batch: &TokenBatch, temperature: f64) -> Tensor<2> {
        let all = log_softmax(hidden.matmul(lm_head.transpose()) / temperature, 1);
        let targets: Vec<i32> = batch.targets().iter().map(|id| *id as i32).collect();
        let n = targets.len();
        all.clone().gather(1, Tensor::<2, Int>::from_data(TensorData::new(targets, [n, 1]), &all.device()))
    }

    /// Computes clipped ratio and k3 KL, mean per sequence: loss type grpo in plain burn operations.
    fn plain(logp: Tensor<2>, batch: &TokenBatch, config: &LossConfig) -> Tensor<1> {
        let device = logp.device();
        let column = |values: Vec<f32>| Tensor::<2>::from_data(TensorData::new(values, [5, 1]), &device);
        let old = column(batch.old_logp().unwrap().to_vec());
        let reference = column(batch.ref_logp().unwrap().to_vec());
        let advantage = column(vec![1.5, 1.5, -0.5, -0.5, -0.5]);
        let weight = column([1.0 / 2.0, 1.0 / 2.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0].map(|w| w / 2.0).to_vec());
        let ratio = (logp.clone() - old).exp();
        let clipped = ratio.clone().clamp(config.ratio_low(), config.ratio_high());
        let surrogate = (ratio * advantage.clone()).min_pair(clipped * advantage);
        let d = reference - logp;
        let kl = d.clone().exp() - d - 1.0;
        ((kl * config.beta - surrogate) * weight).sum()
    }

    #[test]
    fn loss_and_gradients_match_plain_burn_through_the_whole_model() {
        let config =
            LossConfig { beta: 0.1, use_bias_correction_kl: Some(false), temperature: 0.7, ..LossConfig::default() };
        let model =
            Decoder::new(&ModelConfig { initializer_range: 0.3, ..Default::default() }, 1, &Device::flex().autodiff())
                .unwrap();
        let sequences = sequences();
        let batch = token_batch(&sequences).unwrap();
        let hidden = || completion_hidden(&model, &sequences).unwrap();
        let logp = || target_logp(hidden(), model.lm_head().unwrap(), &batch, config.temperature);
        // Ratios below, within and above the clip range.
        let now = to_host(logp().inner());
        let shifted = |by: [f32; 5]| now.iter().zip(by).map(|(l, d)| l + d).collect::<Vec<_>>();
        let batch = batch
            .clone()
            .with_advantages(Advantages::PerSequence(vec![1.5, -0.5]))
            .unwrap()
            .with_old_logp(shifted([-0.5, 0.05, -0.5, 0.5, -0.05]))
            .unwrap()
            .with_ref_logp(shifted([0.3, -0.2, 0.1, -0.4, 0.0]))
            .unwrap();
        let mut want = GradientSum::new();
        let loss = plain(logp(), &batch, &config);
        let value = f64::from(to_host(loss.clone().inner())[0]);
        want.add(&model, loss.backward());
        for implementation in Implementation::ALL {
            let policy_loss = PlannedLoss::new(PolicyLoss {
                config: config.clone().into(),
                backend: Arc::new(backend_cpu::CpuBackend::new()),
                implementation,
                max_tokens: 5,
            })
            .unwrap();
            let scores = policy_loss.score(hidden(), model.lm_head().unwrap(), &batch).unwrap();
            assert!(scores.logp.iter().zip(&now).all(|(a, b)| (a - b).abs() < 1e-5));
            let loss = policy_loss.loss(hidden(), model.lm_head().unwrap(), &batch).unwrap();
            assert!((loss.output.loss - value).abs() < 1e-5, "{} {value}", loss.output.loss);
            let mut got = GradientSum::new();
            got.add(&model, loss.backward.backward());
            assert!(want.norm() > 0.1, "{}", want.norm());
            for (a, b) in got.parameters().iter().zip(want.parameters()) {
                let largest = b.data.iter().fold(0f32, |m, g| m.max(g.abs()));
                let close = a.data.iter().zip(&b.data).all(|(a, b)| (a - b).abs() <= 2e-5 * largest.max(1e-3));
                assert!(close, "{implementation:?} {}", a.name);
            }
        }
    }

    #[test]
    fn cross_entropy_matches_plain_burn_and_micro_batches_add_up() {
        let config = ModelConfig { initializer_range: 0.3, ..Default::default() };
        let model = Decoder::new(&config, 1, &Device::flex().autodiff()).unwrap();
        let (sequences, plans) = (sequences(), PlannedLoss::new(PolicyLoss::cross_entropy()).unwrap());
        let (mut got, mut value) = (GradientSum::new(), 0.0);
        for part in [0..1, 1..2] {
            let sequences = &sequences[part];
            let batch = imitation(&token_batch(sequences).unwrap(), 5).unwrap();
            let loss =
                plans.loss(completion_hidden(&model, sequences).unwrap(), model.lm_head().unwrap(), &batch).unwrap();
            value += loss.output.loss;
            got.add(&model, loss.backward.backward());
        }
        let batch = token_batch(&sequences).unwrap();
        let logp = target_logp(completion_hidden(&model, &sequences).unwrap(), model.lm_head().unwrap(), &batch, 1.0);
        let loss = logp.sum() * (-1.0 / 5.0);
        assert!((value - f64::from(to_host(loss.clone().inner())[0])).abs() < 1e-5, "{value}");
        let mut want = GradientSum::new();
        want.add(&model, loss.backward());
        assert!(want.norm() > 0.1, "{}", want.norm());
        for (a, b) in got.parameters().iter().zip(want.parameters()) {
            let largest = b.data.iter().fold(0f32, |m, g| m.max(g.abs()));
            let close = a.data.iter().zip(&b.data).all(|(a, b)| (a - b).abs() <= 2e-5 * largest.max(1e-3));
            assert!(close, "{}", a.name);
        }
    }
}
