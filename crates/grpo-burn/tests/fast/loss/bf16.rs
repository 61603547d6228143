//! bf16 tensors: read without conversion, accumulated in f32, with gradients rounded to bf16 once.

use super::case::{Case, assert_close, grpo, values};
use super::plain;
use burn::tensor::{DType, Device, Tensor};
use grpo_core::{Implementation, LossConfig};
use rstest::rstest;

/// Half a bf16 ulp is 2^-9 of an entry; the rest allows for bf16 operands of a matrix product.
const TOLERANCE: f32 = 4e-3;

fn rounded<const D: usize>(leaf: Tensor<D>) -> Tensor<D> {
    leaf.inner().cast(DType::BF16)
}

#[rstest]
fn bf16_gradients_match_f32_gradients_of_the_rounded_values(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
) {
    let config = LossConfig { beta: 0.1, ..LossConfig::default() };
    let case = Case::new(&config);
    let (hidden, head, bias) = case.leaves(&Device::flex().autodiff());
    let (hidden, head, bias) = (rounded(hidden), rounded(head), rounded(bias));

    let widen = |t: Tensor<2>| t.cast(DType::F32).autodiff().require_grad();
    let (h, w, b) = (widen(hidden.clone()), widen(head.clone()), bias.clone().cast(DType::F32).autodiff());
    let expected = plain::loss(&config, h.clone().matmul(w.clone().transpose()) + b.unsqueeze(), &case);
    let expected_value = values(expected.clone());
    let grads = expected.backward();

    let leaf = |t: Tensor<2>| t.autodiff().require_grad();
    let (hidden, head, bias) = (leaf(hidden), leaf(head), bias.autodiff().require_grad());
    let grpo = grpo(&config, implementation);
    let step = grpo.loss(hidden.clone(), head.clone(), Some(bias.clone()), &case.batch()).unwrap();
    assert_eq!(step.loss.dtype(), DType::F32);
    let found = (step.loss.clone() * 0.5).backward();

    let name = implementation.name();
    assert_close(&format!("bf16 {name} loss"), &values(step.loss), &expected_value, TOLERANCE);
    for (what, leaf, wide) in [("hidden", &hidden, &h), ("lm_head", &head, &w)] {
        let (found, expected) = (leaf.grad(&found).unwrap(), wide.grad(&grads).unwrap() * 0.5);
        assert_eq!(found.dtype(), DType::BF16);
        assert_close(&format!("bf16 {name} {what}"), &values(found), &values(expected), TOLERANCE);
    }
    assert_eq!(bias.grad(&found).unwrap().dtype(), DType::BF16);
}

/// A frozen head in bf16 with hidden states in f32 gives the same bits as the same head in f32.
#[rstest]
fn frozen_bf16_head_equals_the_same_head_in_f32(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
) {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, _) = case.leaves(&Device::flex().autodiff());
    let narrow = rounded(head);
    let grpo = grpo(&config, implementation);
    let of = |head: Tensor<2>| {
        let scores = grpo.score(hidden.clone(), head.clone(), None, &case.batch()).unwrap();
        let step = grpo.loss(hidden.clone(), head, None, &case.batch()).unwrap();
        assert_eq!(scores.logp, step.scores.logp);
        (values(step.loss.clone()), values(hidden.grad(&step.loss.backward()).unwrap()))
    };
    assert_eq!(of(narrow.clone()), of(narrow.cast(DType::F32)));
}
