//! Calls of a plan with precomputed logits.

use crate::Tensor;
use grpo_core::{
    Dtype, GradientSpec, Grads, Implementation, LossConfig, LossOutput, LossPlan, PlanRequest, PolicyInput, PolicySpec,
    Tiling, TokenBatch,
};

/// Returns a plan request for logits `[tokens, vocab]`, with their gradient.
pub fn logits_request(
    loss: &LossConfig,
    implementation: Implementation,
    tiling: Tiling,
    [tokens, vocab]: [usize; 2],
    dtype: Dtype,
) -> PlanRequest {
    PlanRequest {
        loss: loss.clone().into(),
        implementation,
        tiling,
        max_tokens: tokens,
        policy: PolicySpec::Logits { vocab, dtype },
        gradients: GradientSpec::default(),
    }
}

/// Returns the output and dL/dlogits of one call for the logits `z`.
///
/// Asserts that `score` returns the same scores, that gradients are added to a buffer, except in rows of masked tokens, and that a call in
/// place returns the same output and writes the same gradient, rounded to the dtype of the logits.
pub fn run_logits(plan: &mut dyn LossPlan, z: &Tensor, batch: &TokenBatch) -> (LossOutput, Vec<f32>) {
    let (vocab, input) = (z.len() / batch.tokens(), PolicyInput::Logits(z.as_ref()));
    let mut gradient = vec![0.0; z.len()];
    let output = plan.value_and_grad(input, batch, Grads::of_logits(&mut gradient)).unwrap();
    assert_eq!(plan.score(input, batch).unwrap(), output.scores);

    let masked = |(row, _): &(usize, &mut [f32])| !batch.is_active(*row);
    let mut expected: Vec<f32> = gradient.iter().map(|g| 2.0 * g).collect();
    expected.chunks_mut(vocab).enumerate().filter(masked).for_each(|(_, row)| row.fill(0.25));
    let mut sum = gradient.clone();
    sum.chunks_mut(vocab).enumerate().filter(masked).for_each(|(_, row)| row.fill(0.25));
    plan.value_and_grad(input, batch, Grads::of_logits(&mut sum)).unwrap();
    assert!(sum == expected, "the gradient is not added to the buffer");

    let mut place = z.to_owned();
    let in_place = plan.value_and_grad_in_place(place.as_mut(), batch).unwrap();
    assert_eq!((in_place.loss, &in_place.scores), (output.loss, &output.scores));
    assert!(place == grpo_core::Tensor::F32(gradient.clone()).to_dtype(z.dtype()), "the gradient in place differs");
    (output, gradient)
}
