//! A softmax with nearly all probability on one entry.

use super::*;
use grpo_testkit::config;
use rstest::rstest;

/// The gradient 1 - p of a target that is `gap` above two others: naive f32 rounds p to 1, so that the policy could
/// never change.
#[rstest]
fn a_collapsed_softmax_keeps_its_gradient(#[values(20.0, 30.0, 60.0, 80.0)] gap: f32) {
    let (z, loss, batch) = ([0.0, gap, 0.0], config(r#"{"loss_type": "bnpo"}"#), sequence(&[1], 1.0));
    let others = 2.0 * f64::from(-gap).exp();
    let q = others / (1.0 + others);

    let logp = naive_logp(&z, 1);
    assert_eq!((logp, -(1.0 - logp.exp())), (0.0, 0.0), "the naive gradient is gone");

    let exact = oracle(&loss, &z, 3, &batch);
    assert!((exact.grad_logits[1] + q).abs() <= 1e-12 * q && (exact.logp[0] + others.ln_1p()).abs() <= 1e-12 * q);
    for Found { how, scores, dz, .. } in everywhere(&loss, &z, 3, &batch) {
        assert!(close(scores.logp[0], -others.ln_1p(), 1e-5), "{how}: logp {:e} for {q:e}", scores.logp[0]);
        let expected = [q / 2.0, -q, q / 2.0];
        let right = dz.iter().zip(expected).all(|(got, expected)| close(*got, expected, 1e-5));
        assert!(right, "{how}: {dz:?} for {expected:?}");
    }
}

/// The opposite case: the target's probability underflows in f32.
#[test]
fn a_target_of_probability_0_has_a_full_gradient() {
    let (z, loss, batch) = ([0.0, -200.0, 0.0], config(r#"{"loss_type": "bnpo"}"#), sequence(&[1], 1.0));
    // Naive: log(softmax) instead of log-softmax.
    let p = (-200.0_f32).exp() / (2.0 + (-200.0_f32).exp());
    assert_eq!(p.ln(), f32::NEG_INFINITY, "the naive log-probability");
    for Found { how, scores, dz, .. } in everywhere(&loss, &z, 3, &batch) {
        assert!(close(scores.logp[0], -200.0 - 2.0_f64.ln(), 1e-6), "{how}: {:?}", scores.logp);
        let right = dz.iter().zip([0.5, -1.0, 0.5]).all(|(got, expected)| close(*got, expected, 1e-6));
        assert!(right, "{how}: {dz:?}");
    }
}
