//! Compares the f64 oracle with central differences. Derivatives of losses by log-probabilities and entropies are tested
//! in grpo-core (`tests/fast/evaluate.rs`), so a loss per token and one per sequence suffice here.

use grpo_backend_cpu::oracle::{Policy, evaluate, score};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::*;
use grpo_testkit::*;
use rstest::rstest;

const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-7;

fn small() -> Shape<'static> {
    Shape { lengths: &[4, 0, 1, 5], h: 5, v: 11, mask_every: 4, ..Shape::default() }
}

/// Asserts that `gradient` equals central differences of `value` at `point`.
fn assert_slopes(name: &str, point: &[f64], gradient: &[f64], value: impl Fn(&[f64]) -> f64) {
    let mut point = point.to_vec();
    assert_eq!(point.len(), gradient.len(), "{name}");
    for (i, expected) in gradient.iter().enumerate() {
        let mut at = |offset: f64| {
            let there = point[i];
            point[i] = there + offset;
            let value = value(&point);
            point[i] = there;
            value
        };
        let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
        let off = (slope - expected).abs();
        assert!(off <= TOLERANCE, "{name}[{i}]: gradient {expected:e}, central difference {slope:e}");
    }
}

/// Transforms of logits before the temperature, and per-token temperatures.
#[rstest]
fn gradients_match_central_differences(
    #[values("grpo", "gspo")] loss_type: &str,
    #[values("scale_logits", "scale_logprobs")] temperature_mode: &str,
    #[values(1.0, 0.4, 2.5, -0.8)] logit_scale: f64,
    #[values(None, Some(2.0), Some(30.0))] final_logit_softcapping: Option<f64>,
    #[values(false, true)] temperatures: bool,
) {
    let clip = if loss_type == "gspo" { r#""epsilon_low": 0.04, "epsilon_high": 0.05,"# } else { "" };
    let loss = config(&format!(
        r#"{{"loss_type": "{loss_type}", {clip} "beta": 0.2, "use_bias_correction_kl": true, "temperature": 0.8,
            "temperature_mode": "{temperature_mode}", "entropy_coef": 0.05}}"#
    ));
    let loss = LossConfig { logit_scale, final_logit_softcapping, ..loss };
    let case = Case::new(&loss, &Shape { temperatures, ..small() }, 23);
    let wide = |t: &[f32]| t.iter().map(|x| if x.is_nan() { 0.3 } else { f64::from(*x) }).collect::<Vec<_>>();
    let (hidden, lm_head, bias) = (wide(&case.hidden), wide(&case.lm_head), wide(case.bias.as_ref().unwrap()));
    let of = |hidden: &[f64], lm_head: &[f64], bias: &[f64]| {
        let policy = Policy::hidden(hidden, lm_head, Some(bias), HeadLayout::VocabHidden, case.v);
        evaluate(&loss, &policy, &case.batch).unwrap()
    };
    let got = of(&hidden, &lm_head, &bias);
    assert_flows(&got);
    assert_slopes("hidden", &hidden, &got.grad_hidden, |hidden| of(hidden, &lm_head, &bias).loss);
    assert_slopes("lm_head", &lm_head, &got.grad_lm_head, |lm_head| of(&hidden, lm_head, &bias).loss);
    assert_slopes("bias", &bias, &got.grad_bias, |bias| of(&hidden, &lm_head, bias).loss);
}

/// Gradients with respect to precomputed logits sum to zero over the vocabulary.
#[rstest]
fn gradients_by_logits(#[values("grpo", "gspo")] loss_type: &str) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &small(), 29);
    let (n, v) = (case.batch.tokens(), case.v);
    let z: Vec<f64> = (0..n * v).map(|i| 3.0 * ((i * 37 % 101) as f64 / 50.0 - 1.0)).collect();
    let logp = score(&loss, &Policy::logits(&z, v), &case.batch).unwrap().logp;
    // Ratios on both sides of the clip range.
    let old = logp.iter().enumerate().map(|(i, l)| (l + [0.1, -0.33, 0.31, -0.02][i % 4]) as f32).collect();
    let batch = case.batch.with_old_logp(old).unwrap();
    let of = |z: &[f64]| evaluate(&loss, &Policy::logits(z, v), &batch).unwrap();
    let got = of(&z);
    assert!(got.grad_hidden.is_empty() && got.grad_lm_head.is_empty());
    assert_slopes("logits", &z, &got.grad_logits, |z| of(z).loss);
    for row in got.grad_logits.chunks(v) {
        assert!(row.iter().sum::<f64>().abs() < 1e-13);
    }
}

/// Losses and entropies of logits for which a naive exp overflows, and the evaluator's results.
#[test]
fn large_logits_are_finite() {
    let loss = loss("grpo");
    let case = Case::new(&loss, &small(), 31);
    for scale in [1e2, 1e4, 1e300] {
        let z: Vec<f64> =
            (0..case.batch.tokens() * case.v).map(|i| scale * ((i * 29 % 17) as f64 / 8.0 - 1.0)).collect();
        let logits = Policy::logits(&z, case.v);
        let got = evaluate(&loss, &logits, &case.batch).unwrap();
        let finite = |list: &[f64]| list.iter().all(|x| x.is_finite());
        assert!(finite(&got.logp) && finite(&got.entropy) && finite(&got.grad_logits), "{scale:e}: {got:?}");
        assert!(Evaluator::new(&loss, &case.batch).is_ok());
    }
}

/// 2^22 tokens, hidden size 1, a vocabulary of 2^22: the logits need 2^47 bytes, more than a process can address.
#[test]
fn logits_larger_than_memory_are_an_error() {
    let n = 1 << 22;
    let ones = vec![1.0; n];
    let policy = Policy::hidden(&ones, &ones, None, HeadLayout::VocabHidden, n);
    let batch = TokenBatch::packed(vec![0; n], vec![0, n]).unwrap().with_advantages(vec![1.0]).unwrap();
    let error = evaluate::<f64>(&LossConfig::default(), &policy, &batch).unwrap_err();
    assert!(error.to_string().contains("no memory for dense logits [4194304, 4194304]"), "{error}");
}
