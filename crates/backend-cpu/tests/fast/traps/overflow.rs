//! Overflow and underflow of exp in f32, and products with the result.

use super::*;
use grpo_testkit::config;
use rstest::rstest;

/// Returns logits (l, 0), for which log p_0 = l for very negative l.
fn unlikely(logp: f32, old: f32, reference: f32, advantage: f32) -> ([f32; 2], TokenBatch) {
    let batch = sequence(&[0], advantage).with_old_logp(vec![old]).unwrap().with_ref_logp(vec![reference]).unwrap();
    ([logp, 0.0], batch)
}

/// TRL's corrected k3 for a token with vanishing probability: r = e^-110 is 0 in f32, e^110 overflows, but their
/// product is 1.
#[test]
fn underflowing_ratio_times_overflowing_kl_is_finite() {
    let loss = config(r#"{"beta": 0.1}"#);
    let (z, batch) = unlikely(-110.0, 0.0, 0.0, 1.0);
    let d = 110.0_f32;
    let naive = (-d).exp() * (d.exp() - d - 1.0);
    assert!(naive.is_nan());
    for Found { how, loss, dz, .. } in everywhere(&loss, &z, 2, &batch) {
        assert!((loss - 0.1).abs() <= 1e-7, "{how}: {loss}");
        // r (l - q) = -110 e^-110
        assert!(dz.iter().all(|g| g.abs() < 1e-30), "{how}: {dz:?}");
    }
}

/// Without the correction, the term grows, but stays finite and still pulls towards the reference.
#[test]
fn k3_beyond_f32_has_a_finite_gradient() {
    let loss = config(r#"{"beta": 0.1, "use_bias_correction_kl": false}"#);
    let (z, batch) = unlikely(-110.0, -110.0, 0.0, 1.0);
    assert_eq!(110.0_f32.exp(), f32::INFINITY, "the naive term");
    for Found { how, loss, dz, .. } in everywhere(&loss, &z, 2, &batch) {
        assert!(loss.is_finite() && loss > 1e10, "{how}: {loss}");
        assert!(dz.iter().all(|g| g.is_finite()) && dz[0] < -1e10, "{how}: {dz:?}");
    }
}

/// verl clamps k3 at 10, where the gradient is 0, and not 0 x e^110.
#[test]
fn a_clamped_kl_has_no_gradient_rather_than_nan() {
    let loss = config(r#"{"beta": 0.1, "semantics": "verl", "kl_estimator": "low_var_kl"}"#);
    let (z, batch) = unlikely(-110.0, -110.0, 0.0, 0.0);
    // Naive: reverse mode through a clamp after exp.
    let naive = 0.0 * (1.0 - 110.0_f32.exp());
    assert!(naive.is_nan());
    for Found { how, loss, dz, .. } in everywhere(&loss, &z, 2, &batch) {
        assert!((loss - 1.0).abs() <= 1e-12, "{how}: {loss}");
        assert_eq!(dz, [0.0, 0.0], "{how}");
    }
}

/// delta bounds a ratio of e^95 or e^120 at 4: its derivative there is 0, and not 0 x e^95. The other, ordinary token
/// keeps its gradient.
#[rstest]
fn delta_bounds_ratios_beyond_f32(#[values(95.0, 120.0)] log_ratio: f32, #[values(-1.5, 1.5)] advantage: f32) {
    let loss = config(r#"{"loss_type": "bnpo", "delta": 4.0}"#);
    let z = [0.3, -0.4, 0.1, 0.9];
    let logp = naive_logp(&z[..2], 0);
    let batch = sequence(&[0, 1], advantage).with_old_logp(vec![logp - log_ratio, naive_logp(&z[2..], 1)]).unwrap();

    let ratio = log_ratio.exp();
    let clamp_slope = if ratio <= 4.0 { 1.0 } else { 0.0 };
    assert!((clamp_slope * ratio).is_nan(), "naive: clamp after exp");

    // -min(4 A, clip(r) A) for the first token, -A for the second.
    let a = f64::from(advantage);
    let expected = 0.5 * (-f64::min(4.0 * a, 1.2 * a) - a);
    let p = f64::from(z[3] - z[2]).exp() / (1.0 + f64::from(z[3] - z[2]).exp());
    let slope = -0.5 * a * (1.0 - p);
    let exact = oracle(&loss, &z, 2, &batch);
    assert!((exact.loss - expected).abs() < 1e-6 && exact.grad_logits[..2] == [0.0, 0.0]);
    for Found { how, loss, dz, .. } in everywhere(&loss, &z, 2, &batch) {
        assert!((loss - expected).abs() <= 1e-6, "{how}: {loss} for {expected}");
        assert_eq!(dz[..2], [0.0, 0.0], "{how}");
        assert!(close(dz[2], -slope, 1e-5) && close(dz[3], slope, 1e-5), "{how}: {dz:?} for {slope}");
    }
}

/// The dual clip, cispo's cap and verl's guard do the same.
#[rstest]
#[case::dual_clip(r#"{"semantics": "verl", "log_ratio_guard": "off"}"#, -1.5, 4.5, 0.0)]
#[case::guard(r#"{"semantics": "verl"}"#, -1.5, 4.5, 0.0)]
#[case::clip(r#"{}"#, 1.5, -1.8, 0.0)]
#[case::cispo(r#"{"loss_type": "cispo", "epsilon_high": 5.0}"#, 1.5, 7.5 * 2.0_f64.ln(), -3.75)]
fn other_bounds_hold_for_ratios_beyond_f32(
    #[case] json: &str,
    #[case] advantage: f32,
    #[case] expected: f64,
    #[case] slope: f64,
) {
    let loss = config(json);
    let z = [0.0, 0.0];
    let batch = sequence(&[0], advantage).with_old_logp(vec![-120.0]).unwrap();
    for Found { how, loss, dz, .. } in everywhere(&loss, &z, 2, &batch) {
        assert!((loss - expected).abs() <= 1e-6, "{how}: {loss} for {expected}");
        assert!((f64::from(dz[0]) - slope).abs() <= 1e-6 && dz[0] == -dz[1], "{how}: {dz:?} for {slope}");
    }
}
