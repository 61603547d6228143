//! The loss of logits that the model computed.

use super::case::{Case, N, V, assert_close, grpo, values};
use super::plain;
use super::spy::Spy;
use burn::tensor::{DType, Device, Tensor};
use grpo_burn::GrpoLoss;
use grpo_core::{Implementation, LossConfig};
use rstest::rstest;
use std::sync::Arc;

const TOLERANCE: f32 = 1e-5;

fn leaf(case: &Case) -> Tensor<2> {
    let (hidden, head, bias) = case.leaves(&Device::flex().autodiff());
    (hidden.matmul(head.transpose()) + bias.unsqueeze()).inner().autodiff().require_grad()
}

#[rstest]
fn logits_gradients_match_the_loss_on_slices(
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
    #[values(false, true)] kept: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) {
    let config = LossConfig { beta: 0.1, ..LossConfig::default() };
    let case = Case::new(&config);
    // Both sides start from logits that are exact in bf16, and both round the gradient to bf16 in the backward pass of the cast.
    let leaf = leaf(&case).inner().cast(dtype).cast(DType::F32).autodiff().require_grad();
    let expected = plain::loss(&config, leaf.clone() * 1.0, &case);
    let expected_grad = values(leaf.grad(&expected.backward()).unwrap());

    let spy = Arc::new(Spy::default());
    let grpo = GrpoLoss::builder(config).implementation(implementation).build(&spy).unwrap();
    let logits = (leaf.clone() * 1.0).cast(dtype);
    let copy = kept.then(|| logits.clone());
    let before = copy.clone().map(values);
    let step = grpo.loss_from_logits(logits, &case.batch()).unwrap();
    let found = values(leaf.grad(&(step.loss.clone() * 1.0).backward()).unwrap());
    let tolerance = if dtype == DType::F32 { TOLERANCE } else { 4e-3 };
    let name = format!("logits {} {dtype:?} kept: {kept}", implementation.name());
    assert_close(&format!("{name} loss"), &values(step.loss), &values(expected), TOLERANCE);
    assert_close(&format!("{name} gradient"), &found, &expected_grad, tolerance);
    assert_eq!(*spy.in_place.lock().unwrap(), [!kept], "overwritten only where nobody looks");
    assert_eq!(copy.map(values), before);
}

#[test]
fn logits_scores_equal_those_of_the_loss() {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let logits = leaf(&case);
    let grpo = grpo(&config, Implementation::Reference);
    let scores = grpo.score_from_logits(logits.clone().reshape([2, N / 2, V]).inner(), &case.batch()).unwrap();
    assert_eq!(grpo.loss_from_logits(logits, &case.batch()).unwrap().scores, scores);
}
