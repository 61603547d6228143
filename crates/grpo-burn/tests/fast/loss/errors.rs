//! Illegal arguments give descriptive errors, before burn or a kernel can panic.

use super::case::{Case, H, N, V, grpo, laid_out, tensor};
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor};
use grpo_burn::{Error, GrpoLoss};
use grpo_core::{HeadLayout, Implementation, LossConfig, Tiling};

fn setup() -> (GrpoLoss, Case, Tensor<2>, Tensor<2>, Tensor<1>) {
    let config = LossConfig::default();
    let case = Case::new(&config);
    let (hidden, head, bias) = case.leaves(&Device::flex().autodiff());
    (grpo(&config, Implementation::Reference), case, hidden, head, bias)
}

#[track_caller]
fn assert_says<T: std::fmt::Debug>(result: Result<T, Error>, words: &[&str]) {
    let message = result.unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let (grpo, case, hidden, head, bias) = setup();
    let batch = case.batch();
    let rows = hidden.clone().slice([0..N - 1, 0..H]);
    assert_says(grpo.loss(rows, head.clone(), None, &batch), &["hidden", "26", "[25, 12]"]);
    let vector = hidden.clone().reshape([N * H]);
    assert_says(grpo.loss(vector, head.clone(), None, &batch), &["hidden", "[312]"]);
    let turned = head.clone().transpose();
    assert_says(grpo.loss(hidden.clone(), turned, None, &batch), &["lm_head", "[V, H] with H = 12", "[12, 37]"]);
    let short = Some(bias.narrow(0, 0, V - 1));
    assert_says(grpo.loss(hidden.clone(), head.clone(), short, &batch), &["bias", "V = 37", "[36]"]);
    let grpo = laid_out(&LossConfig::default(), Implementation::Reference, HeadLayout::HiddenVocab);
    assert_says(grpo.score(hidden.clone(), head, None, &batch), &["lm_head", "[H, V] with H = 12", "[37, 12]"]);
    let logits = Tensor::<3>::zeros([3, 2, V], &Device::flex().autodiff()).require_grad();
    assert_says(grpo.loss_from_logits(logits, &batch), &["logits", "26", "[3, 2, 37]"]);
}

#[test]
fn wrong_dtypes_are_refused() {
    let (grpo, case, hidden, head, bias) = setup();
    let batch = case.batch();
    let wide = hidden.clone().cast(DType::F64);
    assert_says(grpo.loss(wide, head.clone(), None, &batch), &["hidden", "F64", "f32 or bf16"]);
    let mixed = head.clone().cast(DType::BF16);
    assert_says(grpo.loss(hidden.clone(), mixed, None, &batch), &["lm_head", "BF16", "expected f32"]);
    let mixed = Some(bias.cast(DType::F16));
    assert_says(grpo.loss(hidden, head, mixed, &batch), &["bias", "F16"]);
}

#[test]
fn loss_without_tracked_tensors_is_refused() {
    let (grpo, case, hidden, head, _) = setup();
    let batch = case.batch();
    let outside = grpo.loss(hidden.clone().inner(), head.clone().inner(), None, &batch);
    assert!(matches!(outside, Err(Error::NotTracked { .. })));
    let frozen = |t: Tensor<2>| t.set_require_grad(false);
    assert_says(grpo.loss(frozen(hidden), frozen(head), None, &batch), &["none of hidden", "score()"]);
    let logits = tensor(&[0.5; N * V], [N, V], &Device::flex());
    assert_says(grpo.loss_from_logits(logits, &batch), &["no logits"]);
}

#[test]
fn different_checkpointing_strategies_are_refused() {
    let (grpo, case, hidden, head, _) = setup();
    let other = head.inner().autodiff().with_gradient_checkpointing_strategy(GradientCheckpointingStrategy::Balanced);
    let result = grpo.loss(hidden, other, None, &case.batch());
    assert!(matches!(result, Err(Error::Checkpointing { tensor: "lm_head" })));
}

#[test]
fn errors_of_the_loss_library_are_passed_on() {
    let (grpo, case, hidden, head, _) = setup();
    let mut outside = Case::new(&LossConfig::default());
    outside.targets[4] = V as i64;
    let result = grpo.loss(hidden.clone(), head.clone(), None, &outside.batch());
    assert!(matches!(result, Err(Error::Loss(grpo_core::Error::Value { .. }))), "{result:?}");
    let config = LossConfig { temperature: 0.0, ..LossConfig::default() };
    let backend = grpo_backend_cpu::CpuBackend::new();
    assert_says(GrpoLoss::builder(config).build(&backend), &["temperature"]);
    let tiling = Tiling { token_chunk: Some(0), ..Tiling::default() };
    let without_tiles = GrpoLoss::builder(LossConfig::default()).tiling(tiling).build(&backend).unwrap();
    assert_says(without_tiles.loss(hidden.clone(), head.clone(), None, &case.batch()), &["token_chunk"]);
    // The loss stays usable after an error.
    grpo.loss(hidden, head, None, &case.batch()).unwrap();
}
