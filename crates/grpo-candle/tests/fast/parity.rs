//! Loss and gradients against candle's autodiff of the plain formulation, and against the loss on slices.

use super::case::{Leaves, assert_close, gradient, grpo, laid_out, values};
use super::plain;
use candle_core::{DType, Tensor};
use grpo_core::{Dtype, GrpoLoss, HeadLayout, Implementation, LossConfig};
use grpo_testkit::family::{LOSSES, loss, others};
use grpo_testkit::{Case, Shape};
use rstest::rstest;

const GRPO: &str = r#"{"loss_type": "grpo", "beta": 0.1, "epsilon_high": 0.28, "temperature": 0.8}"#;
const DAPO: &str = r#"{"loss_type": "dapo", "beta": 0.05, "epsilon_low": 0.1, "epsilon_high": 0.3,
    "entropy_coef": 0.02, "use_bias_correction_kl": false}"#;
const CISPO: &str = r#"{"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1, "temperature": 1.3,
    "temperature_mode": "scale_logprobs"}"#;
const GSPO: &str = r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.05, "beta": 0.1}"#;

fn small<'a>() -> Shape<'a> {
    Shape { h: 12, v: 37, ..Shape::default() }
}

/// Returns loss and gradients of hidden states, head and bias by candle's autodiff, in f32.
fn by_candle(config: &LossConfig, case: &Case) -> [Vec<f32>; 4] {
    let Leaves { hidden, lm_head, bias } = Leaves::new(case);
    let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
    let head = match case.layout {
        HeadLayout::VocabHidden => wide(&lm_head).t().unwrap(),
        HeadLayout::HiddenVocab => wide(&lm_head),
    };
    let logits = wide(&hidden).matmul(&head).unwrap().broadcast_add(&wide(&bias)).unwrap();
    let loss = plain::loss(config, &logits, &case.batch).unwrap();
    let gradients = loss.backward().unwrap();
    let of = |leaf: &Tensor| gradient(&gradients, leaf);
    [values(&loss), of(&hidden), of(&lm_head), of(&bias)]
}

fn by_grpo(config: &LossConfig, implementation: Implementation, case: &Case) -> [Vec<f32>; 4] {
    let Leaves { hidden, lm_head, bias } = Leaves::new(case);
    let grpo = laid_out(config, implementation, case.layout);
    let step = grpo.loss(&hidden, &lm_head, Some(&bias), &case.batch).unwrap();
    let gradients = step.backward().unwrap();
    for leaf in [&hidden, &lm_head, &bias] {
        assert_eq!(
            gradients.get(leaf).map(|g| (g.dtype(), g.shape().clone())),
            Some((leaf.dtype(), leaf.shape().clone()))
        );
    }
    let of = |leaf: &Tensor| gradient(&gradients, leaf);
    [values(&step.loss), of(&hidden), of(&lm_head), of(&bias)]
}

/// f32 at 1e-5. In bf16, dL/dlogits is rounded before its products: 2^-7 as in `Tolerances::with_dlogits`; the largest difference is 7.3e-3.
#[rstest]
fn gradients_match_candle(
    #[values(GRPO, DAPO, CISPO, GSPO)] config: &str,
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values((Dtype::F32, 1e-5), (Dtype::Bf16, 0.0078125))] (dtype, tolerance): (Dtype, f32),
) {
    let config = LossConfig::from_json(config).unwrap();
    let case = Case::new(&config, &Shape { dtype, layout, lean: 0.1, ..small() }, 7);
    let (expected, found) = (by_candle(&config, &case), by_grpo(&config, implementation, &case));
    let name = format!("{:?} {} {layout:?} {dtype:?}", config.loss_type, implementation.name());
    for (what, (found, expected)) in ["loss", "hidden", "lm_head", "bias"].iter().zip(found.iter().zip(&expected)) {
        assert_close(&format!("{name} {what}"), found, expected, tolerance);
    }
}

/// The loss on slices is compared with the oracle for every loss elsewhere.
#[test]
fn every_loss_has_the_bits_of_the_loss_on_slices() {
    for name in LOSSES.into_iter().chain(others()) {
        let config = loss(name);
        let case = Case::new(&config, &small(), 3);
        let request = case.request(&config, Implementation::Fused, Default::default());
        let plain = GrpoLoss::builder(config.clone()).policy(request.policy).gradients(request.gradients);
        let plain = plain.build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
        let (output, expected) = plain.step_owned(case.policy(), &case.batch).unwrap();
        let [loss, hidden, lm_head, bias] = by_grpo(&config, Implementation::Fused, &case);
        assert_eq!(loss, [output.loss as f32], "{name}");
        // candle adds a gradient to 0, which makes -0 to 0.
        let bits = |values: Vec<f32>| values.into_iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>();
        for (found, expected) in [(hidden, expected.hidden), (lm_head, expected.lm_head), (bias, expected.bias)] {
            assert_eq!(bits(found), bits(expected.unwrap()), "{name}");
        }
    }
}

#[rstest]
fn logits_match_candle(
    #[values(GRPO, DAPO, CISPO, GSPO)] config: &str,
    #[values((DType::F32, 1e-5), (DType::BF16, 0.0078125))] (dtype, tolerance): (DType, f32),
) {
    let config = LossConfig::from_json(config).unwrap();
    let case = Case::new(&config, &small(), 11);
    let Leaves { hidden, lm_head, .. } = Leaves::new(&case);
    let logits = hidden.matmul(&lm_head.t().unwrap()).unwrap().to_dtype(dtype).unwrap();
    let leaf = candle_core::Var::from_tensor(&logits).unwrap();
    let expected = plain::loss(&config, &leaf.to_dtype(DType::F32).unwrap(), &case.batch).unwrap();
    let expected = gradient(&expected.backward().unwrap(), &leaf);

    let grpo = grpo_candle::GrpoLoss::builder(config).build(&grpo_backend_cpu::CpuBackend::new()).unwrap();
    let scores = grpo.score_from_logits(&leaf, &case.batch).unwrap();
    let step = grpo.loss_from_logits(&leaf, &case.batch).unwrap();
    assert_eq!(step.scores, scores);
    let found = step.backward().unwrap();
    assert_eq!(found.get(&leaf).unwrap().dtype(), dtype);
    assert_close("logits", &gradient(&found, &leaf), &expected, tolerance);
    assert_eq!(values(&leaf), values(&logits), "the caller's logits are unchanged");
}

#[test]
fn a_scaled_loss_scales_its_gradients_and_backward_can_run_twice() {
    let config = LossConfig::default();
    let case = Case::new(&config, &small(), 5);
    let Leaves { hidden, lm_head, .. } = Leaves::new(&case);
    let loss = grpo(&config, Implementation::Fused).loss(&hidden, &lm_head, None, &case.batch).unwrap().loss;
    let once = gradient(&loss.backward().unwrap(), &hidden);
    let half = gradient(&(&loss * 0.5).unwrap().backward().unwrap(), &hidden);
    let sum = gradient(&(&loss + &loss).unwrap().backward().unwrap(), &hidden);
    for (i, x) in once.iter().enumerate() {
        assert_eq!((half[i], sum[i]), (0.5 * x, 2.0 * x));
    }
    assert_eq!(gradient(&loss.backward().unwrap(), &hidden), once);
}

#[rstest]
fn scores_equal_those_of_the_loss_bit_for_bit(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
) {
    let config = LossConfig::default();
    let case = Case::new(&config, &small(), 5);
    let Leaves { hidden, lm_head, bias } = Leaves::new(&case);
    let grpo = grpo(&config, implementation);
    let scores = grpo.score(&hidden, &lm_head, Some(&bias), &case.batch).unwrap();
    let batch = case.batch.clone().with_old_logp(scores.logp.clone()).unwrap();
    let step = grpo.loss(&hidden, &lm_head, Some(&bias), &batch).unwrap();
    assert_eq!(step.scores, scores);
    assert_eq!(step.metrics.value("is_ratio/max"), Some(1.0));
}
