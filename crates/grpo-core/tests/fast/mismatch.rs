//! Metrics of the sampler mismatch compared with verl's own code in float64 (`tests/golden/mismatch.py`) and
//! NeMo-RL's formulas.

use grpo_core::batch::PolicyValues;
use grpo_core::{Error, LossConfig, Metrics, TokenBatch};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    config: Value,
    shape: [usize; 2],
    old_logp: Vec<f32>,
    sampler_logp: Vec<f32>,
    mask: Vec<f32>,
    expected: BTreeMap<String, f64>,
}

/// Prefixes of verl's other metrics: of single rejection rules, of weights per sequence, and of the normalisation.
const LEFT_OUT: [&str; 4] = ["rollout_rs_token", "rollout_rs_seq_mean", "rollout_is_seq", "rollout_is_batch"];

fn metrics(config: Value, shape: [usize; 2], old: Vec<f32>, sampler: Vec<f32>, mask: &[f32]) -> Metrics {
    let config = LossConfig::from_value(config).unwrap();
    let batch = TokenBatch::padded(&vec![0; mask.len()], mask, shape).unwrap();
    let batch = batch.with_old_logp(old).unwrap().with_sampler_logp(sampler).unwrap();
    let unused = |_: &TokenBatch| -> Result<PolicyValues, Error> { panic!("the batch has old log-probabilities") };
    config.prepare(&batch, unused).unwrap().factors().unwrap().metrics.clone()
}

#[test]
fn mismatch_metrics_match_verl() {
    let golden: Golden = serde_json::from_str(include_str!("../../../../tests/golden/mismatch.json")).unwrap();
    let mut compared = 0;
    for case in golden.cases {
        let mut config = json!({ "semantics": "verl", "loss_type": "vanilla" });
        let setting = case.config.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(setting);
        let found = metrics(config, case.shape, case.old_logp, case.sampler_logp, &case.mask);
        for (name, expected) in case.expected {
            let short = name.trim_start_matches("rollout_corr/");
            if LEFT_OUT.iter().any(|prefix| short.starts_with(prefix)) || short == "rollout_is_oob_ratio" {
                continue;
            }
            let found = found.value(&name).unwrap_or_else(|| panic!("{name} of {}", case.config));
            // verl computes some counts in float32 and divides by a count + 1e-8.
            let close = (found - expected).abs() <= 1e-6 * expected.abs().max(1.0);
            assert!(close, "{name} of {}: {found}, verl has {expected}", case.config);
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn probability_errors_match_nemo_rl() {
    // Two tokens with d = o - s of ln 2 and -ln 4, one token without a sampler log-probability, one masked token.
    let (two, four) = (2_f64.ln(), 4_f64.ln());
    let old = vec![-0.5, -1.5, -9.0, f32::NAN];
    let sampler = vec![(-0.5 - two) as f32, (-1.5 + four) as f32, f32::NAN, 3.0];
    let found = metrics(json!({ "epsilon_low": 0.2 }), [1, 4], old, sampler, &[1.0, 1.0, 1.0, 0.0]);
    let m = |o: f64, s: f64| ((o.exp() + s.exp()) / 2.0).ln();
    let k3 = |d: f64| d.exp() - d - 1.0;
    let pairs = [(-0.5, -0.5 - two), (-1.5, -1.5 + four)];
    let mean = |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(o, s)| f(*o, *s)).sum::<f64>() / 2.0;
    for (name, expected) in [
        ("token_mult_prob_error", mean(&|o, s| (o - s).abs().exp())),
        ("gen_kl_error", mean(&|o, s| k3(o - s))),
        ("policy_kl_error", mean(&|o, s| k3(s - o))),
        ("js_divergence_error", mean(&|o, s| 0.5 * (k3(o - m(o, s)) + k3(s - m(o, s))))),
    ] {
        approx::assert_relative_eq!(found.value(name).unwrap(), expected, max_relative = 1e-6);
    }
    approx::assert_relative_eq!(found.value("token_mult_prob_error").unwrap(), 3.0, max_relative = 1e-6);
}

#[test]
fn mismatch_metrics_stay_finite() {
    let old = vec![-900.0, -0.0, -900.0, 0.0];
    let sampler = vec![0.0, -900.0, 0.0, -900.0];
    let found = metrics(json!({ "vllm_importance_sampling_clip_max": 3.0 }), [2, 2], old, sampler, &[1.0; 4]);
    let infinite: Vec<_> = found.values().filter(|(_, value)| !value.is_finite()).collect();
    assert!(infinite.is_empty(), "{infinite:?}");
}
