//! The value loss of PPO compared with verl's `compute_value_loss` and torch's autograd (`tests/golden/value_loss.py`).

use grpo_core::batch::{TokenBatch, ValueTargets};
use grpo_core::objective::{ValueLossConfig, explained_variance};
use grpo_core::{Error, LossAggMode, LossConfig, Semantics};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    cliprange_value: Option<f64>,
    loss_agg_mode: LossAggMode,
    shape: [usize; 2],
    mask: Vec<f32>,
    values: Vec<f32>,
    old_values: Vec<f32>,
    returns: Vec<f32>,
    loss: f64,
    clip_ratio: f64,
    gradient: Vec<f64>,
    explained_variance: f64,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/value_loss.json");
    let golden: Golden = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    golden.cases
}

fn batch(case: &Case) -> TokenBatch {
    let [b, t] = case.shape;
    let targets = ValueTargets { old_values: case.old_values.clone(), returns: case.returns.clone() };
    TokenBatch::padded(&vec![0; b * t], &case.mask, [b, t]).unwrap().with_value_targets(targets).unwrap()
}

fn verl(mode: LossAggMode) -> LossConfig {
    LossConfig { semantics: Semantics::Verl, loss_agg_mode: Some(mode), ..LossConfig::default() }
}

#[test]
fn value_loss_and_gradient_match_verl() {
    let (mut clipped, mut kinds) = (0, 0);
    for case in cases() {
        let config = ValueLossConfig { vf_coef: 0.7, cliprange_value: case.cliprange_value };
        let out = config.compute(&case.values, &verl(case.loss_agg_mode), &batch(&case)).unwrap();
        assert!((out.value_loss - case.loss).abs() < 1e-7 * case.loss.abs().max(1.0), "{}: {out:?}", case.name);
        assert!((out.loss - 0.7 * case.loss).abs() < 1e-7 * case.loss.abs().max(1.0), "{}", case.name);
        let largest = case.gradient.iter().fold(0.0_f64, |most, g| most.max(g.abs()));
        assert!(largest > 1e-3, "{}", case.name);
        for (found, want) in out.dvalues.iter().zip(&case.gradient) {
            assert!((f64::from(*found) - 0.7 * want).abs() < 1e-6 * largest, "{}: {found} {want}", case.name);
        }
        let ratio = out.metrics.value("value_clip_ratio").unwrap();
        assert!((ratio - case.clip_ratio).abs() < 1e-6, "{}: {ratio}", case.name);
        // verl adds 1e-5 to the variance of the returns.
        let explained = explained_variance(&batch(&case)).unwrap();
        assert!((explained - case.explained_variance).abs() < 1e-4, "{}: {explained}", case.name);
        clipped += usize::from(case.clip_ratio > 0.0);
        kinds += usize::from(case.cliprange_value.is_none());
    }
    assert!(clipped >= 5 && kinds >= 1);
}

#[test]
fn value_losses_of_micro_batches_add_up_to_the_step() {
    let case = &cases()[0];
    let (whole, config) = (batch(case), verl(case.loss_agg_mode));
    let weights = grpo_core::aggregate::token_weights(&config, &whole).unwrap();
    let whole = whole.with_weights(weights).unwrap();
    let value = ValueLossConfig::default();
    let of = |rows: std::ops::Range<usize>| {
        let part = whole.select_sequences(rows.clone()).unwrap();
        let tokens = rows.start * case.shape[1]..rows.end * case.shape[1];
        value.compute(&case.values[tokens], &config, &part).unwrap()
    };
    let (all, first, rest) = (of(0..4), of(0..1), of(1..4));
    assert!((all.value_loss - first.value_loss - rest.value_loss).abs() < 1e-12);
    assert_eq!(all.dvalues, [first.dvalues, rest.dvalues].concat());
}

#[test]
fn value_loss_skips_tokens_without_a_return() {
    let targets = |returns: [f32; 3]| ValueTargets { old_values: vec![0.0; 3], returns: returns.to_vec() };
    let tokens = || TokenBatch::packed(vec![0; 3], vec![0, 1, 3]).unwrap();
    let batch = tokens().with_value_targets(targets([1.0, f32::NAN, 2.0])).unwrap();
    let config = verl(LossAggMode::TokenMean);
    let value = ValueLossConfig { vf_coef: 1.0, cliprange_value: None };
    let out = value.compute(&[0.0, 5.0, 0.0], &config, &batch).unwrap();
    // They still count in the number of tokens, as tokens without an advantage do.
    assert!((out.value_loss - (0.5 + 2.0) / 3.0).abs() < 1e-12);
    assert_eq!(out.dvalues, [-1.0 / 3.0, 0.0, -2.0 / 3.0]);
    assert_eq!(out.metrics.value("return_mean"), Some(1.5));
    assert!(value.compute(&[0.0, f32::NAN, f32::NAN], &config, &batch).unwrap().value_loss.is_nan(), "a NaN is seen");
}

#[test]
fn value_loss_refuses_illegal_inputs() {
    let targets = |old: f32, ret: f32| ValueTargets { old_values: vec![old], returns: vec![ret] };
    let tokens = || TokenBatch::packed(vec![0], vec![0, 1]).unwrap();
    assert!(tokens().with_value_targets(targets(f32::NAN, 0.0)).unwrap_err().to_string().contains("old_values"));
    assert!(tokens().with_value_targets(targets(0.0, f32::INFINITY)).unwrap_err().to_string().contains("returns"));
    let (value, config) = (ValueLossConfig::default(), LossConfig::default());
    assert!(matches!(value.compute(&[0.0], &config, &tokens()), Err(Error::Config(text)) if text.contains("returns")));
    let batch = tokens().with_value_targets(targets(0.0, 0.0)).unwrap();
    assert!(matches!(value.compute(&[0.0, 1.0], &config, &batch), Err(Error::Shape { .. })));
    assert_eq!(explained_variance(&batch), None, "equal returns");
    for (wrong, name) in [
        (ValueLossConfig { vf_coef: -1.0, ..Default::default() }, "vf_coef"),
        (ValueLossConfig { cliprange_value: Some(0.0), ..Default::default() }, "cliprange_value"),
    ] {
        assert!(wrong.validate().unwrap_err().to_string().contains(name));
    }
}
