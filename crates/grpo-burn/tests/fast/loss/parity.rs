//! Loss and gradients of every implementation against the loss on slices, in f32. Losses do not depend on burn: one has a ratio per token,
//! one per sequence.

use super::case::{Case, H, V, assert_close, laid_out, tensor, transposed, values};
use super::plain;
use burn::tensor::Device;
use grpo_core::{HeadLayout, Implementation, LossConfig};
use rstest::rstest;

/// Relative to the largest entry; both sides are f32 with different orders of summation.
const TOLERANCE: f32 = 2e-5;

const GRPO: &str = r#"{"loss_type": "grpo", "beta": 0.1, "epsilon_high": 0.28, "temperature": 0.8}"#;
const GSPO: &str = r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.05, "beta": 0.1}"#;

#[rstest]
fn gradients_match_the_loss_on_slices(
    #[values(GRPO, GSPO)] config: &str,
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let config = LossConfig::from_json(config).unwrap();
    let case = Case::new(&config);
    let device = Device::flex().autodiff();

    let (hidden, head, bias) = case.leaves(&device);
    let logits = hidden.clone().matmul(head.clone().transpose()) + bias.clone().unsqueeze();
    let expected = plain::loss(&config, logits, &case);
    let g = expected.backward();
    let expected = [values(expected), grad(&hidden, &g), grad(&head, &g), grad(&bias, &g)];

    let (hidden, mut head, bias) = case.leaves(&device);
    if layout == HeadLayout::HiddenVocab {
        head = tensor(&transposed(&case.lm_head, H), [H, V], &device).require_grad();
    }
    let grpo = laid_out(&config, implementation, layout);
    let step = grpo.loss(hidden.clone(), head.clone(), Some(bias.clone()), &case.batch()).unwrap();
    let g = step.loss.backward();
    let mut found = [values(step.loss), grad(&hidden, &g), grad(&head, &g), grad(&bias, &g)];
    if layout == HeadLayout::HiddenVocab {
        found[2] = transposed(&found[2], V);
    }

    let name = format!("{:?} {} {layout:?}", config.loss_type, implementation.name());
    for (what, (found, expected)) in ["loss", "hidden", "lm_head", "bias"].iter().zip(found.iter().zip(&expected)) {
        assert_close(&format!("{name} {what}"), found, expected, TOLERANCE);
    }
    assert!((step.value - f64::from(expected[0][0])).abs() < 1e-5);
    let clipped = step.metrics.value("clip_ratio/high_mean").unwrap();
    assert!(clipped > 0.0 && clipped < 0.9, "the case does not reach the clip: {clipped}");
}

fn grad<const D: usize>(leaf: &burn::tensor::Tensor<D>, grads: &burn::tensor::Gradients) -> Vec<f32> {
    values(leaf.grad(grads).expect("a gradient"))
}
