//! A head computed by an expression: W + s B A with a frozen W, as in LoRA.

use super::case::{Case, H, V, assert_close, laid_out, tensor, values};
use burn::tensor::{Device, Tensor};
use grpo_core::{HeadLayout, Implementation, LossConfig};
use rstest::rstest;

const RANK: usize = 3;
const SCALE: f32 = 0.5;
/// Tolerance of finite differences of a loss with f32 log-probabilities, over steps of 1/32.
const TOLERANCE: f32 = 5e-4;

/// The gradients of A and B match finite differences of the loss. A loss that reads only the frozen head would give other numbers.
#[rstest]
fn gradients_of_a_low_rank_adapter_match_finite_differences(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    // This loss is smooth everywhere, so finite differences are valid.
    let config = LossConfig::from_json(r#"{"loss_type": "gpg", "beta": 0.1}"#).unwrap();
    let case = Case::new(&config);
    let device = Device::flex().autodiff();
    let (hidden, head, bias) = case.leaves(&device);
    let (hidden, frozen, bias) = (hidden.detach(), head.detach(), bias.detach());
    let list = |n: usize, step: usize| (0..n).map(|i| (i * step % 17) as f32 / 17.0 - 0.45).collect::<Vec<f32>>();
    let (a, b) = (list(RANK * H, 5), list(V * RANK, 7));

    let grpo = laid_out(&config, implementation, layout);
    let laid_out = |head: Tensor<2>| if layout == HeadLayout::HiddenVocab { head.transpose() } else { head };
    let loss = |a: &[f32], b: &[f32]| {
        let leaves = [tensor(a, [RANK, H], &device).require_grad(), tensor(b, [V, RANK], &device).require_grad()];
        let head = frozen.clone() + leaves[1].clone().matmul(leaves[0].clone()) * SCALE;
        let step = grpo.loss(hidden.clone(), laid_out(head), Some(bias.clone()), &case.batch()).unwrap();
        (step, leaves)
    };
    let (step, leaves) = loss(&a, &b);
    let grads = step.loss.backward();
    let found = leaves.map(|leaf| values(leaf.grad(&grads).expect("a gradient of the adapter")));

    let without = loss(&a, &vec![0.0; b.len()]).0.value;
    assert!((without - step.value).abs() > 0.005, "naive: {without} for {}", step.value);

    let step = 1.0 / 32.0;
    let moved = |list: &[f32], i: usize, by: f32| {
        let mut list = list.to_vec();
        list[i] += by;
        list
    };
    let slope = |ahead: f64, behind: f64| ((ahead - behind) / (2.0 * f64::from(step))) as f32;
    let by_a: Vec<f32> = (0..a.len())
        .map(|i| slope(loss(&moved(&a, i, step), &b).0.value, loss(&moved(&a, i, -step), &b).0.value))
        .collect();
    let by_b: Vec<f32> = (0..b.len())
        .map(|i| slope(loss(&a, &moved(&b, i, step)).0.value, loss(&a, &moved(&b, i, -step)).0.value))
        .collect();
    let name = implementation.name();
    assert_close(&format!("{name} {layout:?}: A"), &found[0], &by_a, TOLERANCE);
    assert_close(&format!("{name} {layout:?}: B"), &found[1], &by_b, TOLERANCE);
}
