//! The loss of a micro-batch, as a burn tensor that can be differentiated.
//!
//! The math is grpo-core's; here log-probabilities are made from hidden states and LM head, and dL/dlogp is handed back
//! to burn's autodiff.

use crate::error::Result;
use crate::model::to_host;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use grpo_core::evaluate::Evaluator;
use grpo_core::{LossConfig, Metrics, TokenBatch};

/// The loss of one micro-batch.
pub(crate) struct PolicyLoss {
    /// A tensor whose gradient is the loss's; its value is not.
    pub(crate) backward: Tensor<1>,
    /// Value of the loss.
    pub(crate) value: f64,
    /// Metrics of grpo-core.
    pub(crate) metrics: Metrics,
}

/// `hidden: [N, H]`, `lm_head: [V, H]`.
pub(crate) fn policy_loss(
    hidden: Tensor<2>,
    lm_head: Tensor<2>,
    batch: &TokenBatch,
    config: &LossConfig,
) -> Result<PolicyLoss> {
    let all = log_softmax(hidden.matmul(lm_head.transpose()) / config.temperature, 1);
    let logp = select_targets(all.clone(), batch);
    let entropy = -(all.clone().exp() * all).sum_dim(1);
    let evaluator = Evaluator::new(config, batch)?;
    let n = batch.active_tokens();
    let (logp_values, entropy_values) = (to_host(logp.clone().inner()), to_host(entropy.clone().inner()));
    let (mut dlogp, mut dentropy) = (vec![0f32; n], vec![0f32; n]);
    let mut totals = evaluator.totals();
    evaluator.evaluate(0..n, &logp_values, &entropy_values, &mut dlogp, &mut dentropy, &mut totals);
    let (value, metrics) = evaluator.finish(totals);
    let device = logp.device();
    let weights = |data: Vec<f32>| Tensor::<2>::from_data(TensorData::new(data, [n, 1]), &device);
    let mut backward = (logp * weights(dlogp)).sum();
    if config.entropy_coef != 0.0 {
        backward = backward + (entropy * weights(dentropy)).sum();
    }
    Ok(PolicyLoss { backward, value, metrics })
}

/// Log-probabilities `[N]` of the batch's targets at the loss's temperature, without gradients.
pub(crate) fn score(hidden: Tensor<2>, lm_head: Tensor<2>, batch: &TokenBatch, config: &LossConfig) -> Vec<f32> {
    let logits = hidden.inner().matmul(lm_head.inner().transpose()) / config.temperature;
    to_host(select_targets(log_softmax(logits, 1), batch))
}

/// Mean negative log-likelihood of the batch's targets, `[1]`.
pub(crate) fn cross_entropy(hidden: Tensor<2>, lm_head: Tensor<2>, batch: &TokenBatch) -> Tensor<1> {
    -select_targets(log_softmax(hidden.matmul(lm_head.transpose()), 1), batch).mean()
}

/// `[N, V]` -> `[N, 1]`: each row's target.
fn select_targets(all: Tensor<2>, batch: &TokenBatch) -> Tensor<2> {
    let targets: Vec<i32> = batch.targets().iter().map(|id| *id as i32).collect();
    let n = targets.len();
    all.clone().gather(1, Tensor::<2, Int>::from_data(TensorData::new(targets, [n, 1]), &all.device()))
}
