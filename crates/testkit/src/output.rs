//! Calls of a plan.

use crate::Case;
use grpo_core::{GradsMut, LossPlan, Metrics, Scores};

/// The accumulated results of calls for one case, with all of its gradients.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// The sum of the losses.
    pub loss: f64,
    /// Scores of the last call.
    pub scores: Scores,
    /// Metrics of all calls.
    pub metrics: Metrics,
    /// dL/dhidden `[N, H]`.
    pub hidden: Vec<f32>,
    /// dL/dlm_head, in the head's layout.
    pub lm_head: Vec<f32>,
    /// dL/dbias `[V]`; empty without a bias.
    pub bias: Vec<f32>,
}

/// Runs one call; gradients start at zero.
pub fn run(plan: &mut dyn LossPlan, case: &Case) -> Output {
    let mut out = Output {
        hidden: vec![0.0; case.hidden.len()],
        lm_head: vec![0.0; case.lm_head.len()],
        bias: vec![0.0; case.bias.as_ref().map_or(0, |bias| bias.len())],
        ..Output::default()
    };
    accumulate(plan, case, &mut out);
    out
}

/// Runs one call; adds loss and gradients to `out`.
pub fn accumulate(plan: &mut dyn LossPlan, case: &Case, out: &mut Output) {
    let grads = GradsMut {
        hidden: Some(out.hidden.as_mut_slice().into()),
        lm_head: Some(out.lm_head.as_mut_slice().into()),
        bias: case.bias.is_some().then_some(out.bias.as_mut_slice().into()),
        logits: None,
    };
    let result = plan.value_and_grad(case.policy(), &case.batch, grads).unwrap();
    out.loss += result.loss;
    out.scores = result.scores;
    out.metrics.merge(&result.metrics);
}
