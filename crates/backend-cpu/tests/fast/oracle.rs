//! Compares the f64 oracle with central differences.

use backend_cpu::oracle::{Policy, evaluate, score};
use grpo_core::aggregate::token_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::*;
use rstest::rstest;
use testkit::*;

const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-7;

fn small() -> Shape<'static> {
    Shape { lengths: &[4, 0, 1, 5], h: 5, v: 11, mask_every: 4, ..Shape::default() }
}

struct Point {
    hidden: Vec<f64>,
    lm_head: Vec<f64>,
    bias: Vec<f64>,
}

impl Point {
    fn policy(&self, vocab: usize) -> Policy<'_, f64> {
        let (hidden, lm_head, bias) = (&self.hidden, &self.lm_head, Some(&self.bias[..]));
        Policy::hidden(hidden, lm_head, bias, HeadLayout::VocabHidden, vocab)
    }
}

/// The function whose derivative is the gradient: the loss, with values that the loss treats as constants (cispo's
/// weight) fixed to those of `case`.
fn value(loss: &LossConfig, policy: &Policy<'_, f64>, case: &Case, base_logp: &[f64]) -> f64 {
    let batch = &case.batch;
    if loss.loss_type != LossType::Cispo {
        return evaluate(loss, policy, batch).unwrap().loss;
    }
    // Without advantages, only KL and entropy remain.
    let none = batch.clone().with_advantages(Advantages::PerSequence(vec![0.0; batch.sequences()])).unwrap();
    let rest = evaluate(loss, policy, &none).unwrap();
    let weights = token_weights(loss, batch).unwrap();
    let (level, mut sum) = (loss.level(), rest.loss);
    for b in 0..batch.sequences() {
        let rows: Vec<usize> = batch.range(b).filter(|i| batch.is_active(*i)).collect();
        let log_ratio = |i: &usize| base_logp[*i] - f64::from(batch.old_logp().unwrap()[*i]);
        let mean = rows.iter().map(log_ratio).sum::<f64>() / rows.len().max(1) as f64;
        for i in rows {
            let ratio = if level == ImportanceSamplingLevel::Token { log_ratio(&i) } else { mean }.exp();
            let constant = ratio.min(loss.epsilon_high.unwrap()) * f64::from(batch.advantage(b, i));
            sum -= weights.policy[i] * constant * rest.logp[i];
        }
    }
    sum
}

#[rstest]
fn gradients_match_central_differences(
    #[values("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")] loss_type: &str,
    #[values("none", "k1", "k2", "k3", "k3 corrected", "k2 corrected")] kl: &str,
    #[values("scale_logits", "scale_logprobs")] temperature_mode: &str,
) {
    let estimator = kl.split(' ').next().unwrap().replace("none", "k3");
    // cispo has no clip for delta to bound, and refuses it.
    let deltas: &[Option<f64>] = if loss_type == "cispo" { &[None] } else { &[None, Some(1.42)] };
    for delta in deltas {
        let loss = config(&serde_json(loss_type, kl, &estimator, temperature_mode, *delta));
        let worst = differences(&loss, &small());
        println!("{loss_type} {kl} {temperature_mode} delta {delta:?}: {worst:e}");
    }
}

/// Transforms of logits before the temperature, and per-token temperatures.
#[rstest]
fn gradients_match_through_transformed_logits(
    #[values("grpo", "cispo", "gspo")] loss_type: &str,
    #[values("scale_logits", "scale_logprobs")] temperature_mode: &str,
    #[values(1.0, 0.4, 2.5, -0.8)] logit_scale: f64,
    #[values(None, Some(2.0), Some(30.0))] final_logit_softcapping: Option<f64>,
    #[values(false, true)] temperatures: bool,
) {
    let loss = config(&serde_json(loss_type, "k3 corrected", "k3", temperature_mode, None));
    let loss = LossConfig { logit_scale, final_logit_softcapping, ..loss };
    differences(&loss, &Shape { temperatures, ..small() });
}

/// Asserts that gradients equal central differences; returns the maximal distance.
fn differences(loss: &LossConfig, shape: &Shape<'_>) -> f64 {
    let case = Case::new(loss, shape, 23);
    let wide = |t: &[f32]| t.iter().map(|x| if x.is_nan() { 0.3 } else { f64::from(*x) }).collect::<Vec<_>>();
    let mut point =
        Point { hidden: wide(&case.hidden), lm_head: wide(&case.lm_head), bias: wide(case.bias.as_ref().unwrap()) };
    let got = evaluate(loss, &point.policy(case.v), &case.batch).unwrap();
    assert_flows(&got);
    let base = score(loss, &point.policy(case.v), &case.batch).unwrap().logp;
    type Part = fn(&mut Point) -> &mut Vec<f64>;
    let parts: [(&str, Part, &[f64]); 3] = [
        ("hidden", |p| &mut p.hidden, &got.grad_hidden),
        ("lm_head", |p| &mut p.lm_head, &got.grad_lm_head),
        ("bias", |p| &mut p.bias, &got.grad_bias),
    ];
    let mut worst = 0.0_f64;
    for (name, list, gradient) in parts {
        for (i, expected) in gradient.iter().enumerate() {
            let mut at = |offset: f64| {
                let there = list(&mut point)[i];
                list(&mut point)[i] = there + offset;
                let value = value(loss, &point.policy(case.v), &case, &base);
                list(&mut point)[i] = there;
                value
            };
            let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let off = (slope - expected).abs();
            assert!(off <= TOLERANCE, "{name}[{i}]: gradient {expected:e}, central difference {slope:e}");
            worst = worst.max(off);
        }
    }
    worst
}

fn serde_json(loss_type: &str, kl: &str, estimator: &str, temperature_mode: &str, delta: Option<f64>) -> String {
    let mut json = format!(
        r#"{{"loss_type": "{loss_type}", "kl_estimator": "{estimator}", "beta": {}, "use_bias_correction_kl": {},
            "temperature": 0.8, "temperature_mode": "{temperature_mode}", "entropy_coef": 0.05"#,
        if kl == "none" { 0.0 } else { 0.2 },
        kl.ends_with("corrected"),
    );
    match loss_type {
        "dr_grpo" => json += r#", "max_completion_length": 5"#,
        "cispo" => json += r#", "epsilon_high": 1.25"#,
        "gspo" => json += r#", "epsilon_low": 0.04, "epsilon_high": 0.05"#,
        _ => {}
    }
    if let Some(delta) = delta {
        json += &format!(r#", "delta": {delta}"#);
    }
    json + "}"
}

/// Gradients with respect to precomputed logits sum to zero over the vocabulary.
#[rstest]
fn gradients_by_logits(#[values("grpo", "cispo", "gspo")] loss_type: &str) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &small(), 29);
    let (n, v) = (case.batch.tokens(), case.v);
    let mut z: Vec<f64> = (0..n * v).map(|i| 3.0 * ((i * 37 % 101) as f64 / 50.0 - 1.0)).collect();
    let logp = score(&loss, &Policy::logits(&z, v), &case.batch).unwrap().logp;
    // Ratios on both sides of the clip range.
    let old = logp.iter().enumerate().map(|(i, l)| (l + [0.1, -0.33, 0.31, -0.02][i % 4]) as f32).collect();
    let case = Case { batch: case.batch.clone().with_old_logp(old).unwrap(), ..case };
    let got = evaluate(&loss, &Policy::logits(&z, v), &case.batch).unwrap();
    assert!(got.grad_hidden.is_empty() && got.grad_lm_head.is_empty());
    for i in 0..n * v {
        let mut at = |offset: f64| {
            let there = z[i];
            z[i] = there + offset;
            let value = value(&loss, &Policy::logits(&z, v), &case, &got.logp);
            z[i] = there;
            value
        };
        let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
        assert!((slope - got.grad_logits[i]).abs() <= TOLERANCE, "[{i}]: {} and {slope}", got.grad_logits[i]);
    }
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
