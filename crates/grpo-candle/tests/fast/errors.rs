//! Illegal arguments give descriptive errors, before candle or a kernel fails.

use super::case::{Leaves, grpo, laid_out};
use candle_core::{DType, Device, Tensor, Var};
use grpo_candle::{Error, GrpoLoss, token_batch};
use grpo_core::{HeadLayout, Implementation, LossConfig, Tiling, TokenBatch};
use grpo_testkit::{Case, Shape};

fn setup() -> (GrpoLoss, TokenBatch, Leaves) {
    let config = LossConfig::default();
    let case = Case::new(&config, &Shape { h: 12, v: 37, ..Shape::default() }, 7);
    (grpo(&config, Implementation::Reference), case.batch.clone(), Leaves::new(&case))
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
    let (grpo, batch, Leaves { hidden, lm_head, bias }) = setup();
    let rows = hidden.narrow(0, 0, 36).unwrap();
    assert_says(grpo.loss(&rows, &lm_head, None, &batch), &["hidden", "37", "[36, 12]"]);
    assert_says(grpo.loss(&hidden.flatten_all().unwrap(), &lm_head, None, &batch), &["hidden", "[444]"]);
    let turned = lm_head.t().unwrap();
    assert_says(grpo.loss(&hidden, &turned, None, &batch), &["lm_head", "[V, H] with H = 12", "[12, 37]"]);
    let short = bias.narrow(0, 0, 36).unwrap();
    assert_says(grpo.loss(&hidden, &lm_head, Some(&short), &batch), &["bias", "V = 37", "[36]"]);
    let logits = Var::zeros((3, 2, 37), DType::F32, &Device::Cpu).unwrap();
    assert_says(grpo.loss_from_logits(&logits, &batch), &["logits", "37", "[3, 2, 37]"]);
    let grpo = laid_out(&LossConfig::default(), Implementation::Reference, HeadLayout::HiddenVocab);
    assert_says(grpo.score(&hidden, &lm_head, None, &batch), &["lm_head", "[H, V] with H = 12", "[37, 12]"]);
    let ids = Tensor::zeros(4, DType::U32, &Device::Cpu).unwrap();
    assert_says(token_batch(&ids, &ids), &["targets", "[B, T]", "[4]"]);
    let ids = ids.reshape((2, 2)).unwrap();
    assert_says(token_batch(&ids, &ids.narrow(0, 0, 1).unwrap()), &["mask", "[2, 2]", "[1, 2]"]);
    assert_says(token_batch(&ids, &(ids.ones_like().unwrap() * 2.0).unwrap()), &["mask", "neither 0 nor 1"]);
}

#[test]
fn wrong_dtypes_are_refused() {
    let (grpo, batch, Leaves { hidden, lm_head, bias }) = setup();
    let to = |t: &Tensor, dtype| t.to_dtype(dtype).unwrap();
    assert_says(grpo.loss(&to(&hidden, DType::F64), &lm_head, None, &batch), &["hidden", "F64", "F32 or BF16"]);
    assert_says(grpo.loss(&hidden, &to(&lm_head, DType::BF16), None, &batch), &["lm_head", "BF16", "expected F32"]);
    assert_says(grpo.loss(&hidden, &lm_head, Some(&to(&bias, DType::F16)), &batch), &["bias", "F16"]);
}

#[test]
fn loss_without_tracked_tensors_is_refused() {
    let (grpo, batch, Leaves { hidden, lm_head, .. }) = setup();
    let (hidden, lm_head) = (hidden.detach(), lm_head.detach());
    assert!(matches!(grpo.loss(&hidden, &lm_head, None, &batch), Err(Error::NotTracked { .. })));
    assert_says(grpo.loss(&hidden, &lm_head, None, &batch), &["none of hidden", "score()"]);
    let logits = Tensor::zeros((37, 37), DType::F32, &Device::Cpu).unwrap();
    assert_says(grpo.loss_from_logits(&logits, &batch), &["no logits"]);
}

#[test]
fn errors_of_the_loss_library_are_passed_on() {
    let (grpo, batch, Leaves { hidden, lm_head, .. }) = setup();
    let mut targets = batch.targets().to_vec();
    targets[0] = 99;
    let outside = TokenBatch::packed(targets, batch.offsets().to_vec()).unwrap().with_mask(&batch.mask()).unwrap();
    let outside = outside.with_advantages(vec![1.0; batch.sequences()]).unwrap();
    let result = grpo.loss(&hidden, &lm_head, None, &outside);
    assert!(matches!(result, Err(Error::Loss(grpo_core::Error::Value { .. }))), "{result:?}");
    let config = LossConfig { temperature: 0.0, ..LossConfig::default() };
    let backend = grpo_backend_cpu::CpuBackend::new();
    assert_says(GrpoLoss::builder(config).build(&backend), &["temperature"]);
    let tiling = Tiling { token_chunk: Some(0), ..Tiling::default() };
    let without_tiles = GrpoLoss::builder(LossConfig::default()).tiling(tiling).build(&backend).unwrap();
    assert_says(without_tiles.loss(&hidden, &lm_head, None, &batch), &["token_chunk"]);
    // The loss stays usable after an error.
    grpo.loss(&hidden, &lm_head, None, &batch).unwrap();
    // `?` works in functions that return candle's error.
    let converted = candle_core::Error::from(grpo.loss(&hidden, &lm_head, None, &outside).unwrap_err());
    assert!(converted.to_string().contains("id 99 is outside the vocabulary"), "{converted}");
}
