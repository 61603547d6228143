//! The loss of logits as `grpo_core::GrpoLoss` computes it on slices, as a burn tensor.

use super::case::{Case, N, V, tensor, values};
use burn::tensor::Tensor;
use grpo_core::{GrpoLoss, Implementation, LossConfig};

/// Returns the loss of logits `[N, V]` in the implementation `reference`.
pub(crate) fn slices(config: &LossConfig) -> GrpoLoss {
    let loss = GrpoLoss::builder(config.clone()).logits(V).implementation(Implementation::Reference);
    loss.build(&grpo_backend_cpu::CpuBackend::new()).expect("a legal configuration")
}

/// Returns a scalar with the loss and the gradients of logits `[N, V]`: linear in the logits, so burn differentiates it exactly.
pub(crate) fn loss(config: &LossConfig, logits: Tensor<2>, case: &Case) -> Tensor<1> {
    let (z, mut dz) = (values(logits.clone()), vec![0.0; N * V]);
    let output = slices(config).step_logits(&z, &case.batch(), &mut dz).expect("a legal batch");
    let linear = (logits.clone() * tensor(&dz, [N, V], &logits.device())).sum();
    linear.clone() - linear.detach() + output.loss
}
