//! AdamW against values computed by hand, and its checkpoints.

use super::*;
use crate::decoder::PackedBatch;
use burn::tensor::Device;
use models::ModelConfig;

/// Learning rate of tests whose result does not depend on it.
const RATE: f64 = 7e-4;

fn model() -> Decoder {
    let config = ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() };
    Decoder::new(&config, 1, &Device::flex().autodiff()).unwrap()
}

/// Returns gradients of an arbitrary loss.
fn gradients(model: &Decoder, ids: &[u32]) -> GradientSum {
    let hidden = model.forward(&PackedBatch::new(&[ids]).unwrap()).unwrap();
    let logits = hidden.reshape([ids.len(), 16]).matmul(model.lm_head().unwrap().transpose());
    let mut sum = GradientSum::new();
    sum.add(model, logits.square().sum().backward());
    sum
}

fn config() -> AdamWConfig {
    AdamWConfig::default()
}

fn state(optimizer: &AdamW) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    optimizer.export(&model(), &mut tensors).unwrap();
    tensors
}

/// Applies one step to `model` and returns it.
fn step(
    optimizer: &mut AdamW,
    mut model: Decoder,
    gradients: &GradientSum,
    learning_rate: f64,
) -> Result<(Decoder, UpdateReport)> {
    let report = optimizer.step(&mut model, gradients, learning_rate)?;
    Ok((model, report))
}

#[test]
fn two_steps_match_values_computed_by_hand() {
    let plain = config().step(1, RATE);
    let rule = |root: f64, rate: f64, decay: f32| Rule {
        clip: 0.5,
        step: AdamWStep {
            beta1: 0.9,
            beta2: 0.99,
            rate: rate as f32,
            root: root.sqrt() as f32,
            epsilon: 0.0,
            decay,
            ..plain
        },
    };
    let like = NamedTensor { name: "w".into(), shape: vec![2, 1], data: vec![0.0; 2] };
    let mut moments = Moments::zeros(&like);
    let mut w = [1.0f32, -2.0];
    // Step 1: g = (2, -4) / 2; m = 0.1 g; v = 0.01 g^2; the corrected ratio is the sign of g.
    rule(1.0 - 0.99, 0.1 / (1.0 - 0.9), 0.99).apply(&mut w, &[2.0, -4.0], &mut moments);
    assert!((w[0] - (0.99 - 0.1)).abs() < 1e-6, "{w:?}");
    assert!((w[1] - (-1.98 + 0.1)).abs() < 1e-6, "{w:?}");
    assert!((moments.first[0] - 0.1).abs() < 1e-7 && (moments.second[1] - 0.04).abs() < 1e-7);
    // Step 2 with g = (0, 0): m = 0.09, m^ = 0.09 / 0.19; v = 0.0099, v^ = 0.0099 / 0.0199.
    let before = w[0];
    rule(1.0 - 0.99f64.powi(2), 0.1 / (1.0 - 0.81), 1.0).apply(&mut w, &[0.0, 0.0], &mut moments);
    let expected = before - 0.1 * (0.09 / 0.19) / (0.0099f32 / 0.0199).sqrt();
    assert!((w[0] - expected).abs() < 1e-6, "{} {expected}", w[0]);
}

#[test]
fn clipping_uses_the_norm_of_the_whole_gradient() {
    let sum = gradients(&model(), &[1, 5, 9]);
    let by_hand: f64 = sum.parameters().iter().flat_map(|p| p.data.iter()).map(|g| f64::from(g * g)).sum();
    assert!((sum.norm() - by_hand.sqrt()).abs() < 1e-3 * sum.norm());
    // Adam's first update is invariant to the scale of the gradient, but the moments are not.
    let mut clipped = AdamW::new(&AdamWConfig { max_grad_norm: 0.5, ..config() });
    let (_, report) = step(&mut clipped, model(), &sum, RATE).unwrap();
    assert_eq!(report.grad_norm, sum.norm());
    let moment_norm: f64 =
        clipped.moments.iter().flat_map(|m| m.first.iter()).map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    assert!((moment_norm - 0.1 * 0.5).abs() < 1e-4, "{moment_norm}");
}

#[test]
fn norms_and_biases_are_not_decayed() {
    let mut sum = gradients(&model(), &[1, 5]);
    for p in &mut sum.parameters {
        p.data.fill(0.0);
    }
    let before = model().parameters();
    let mut optimizer = AdamW::new(&AdamWConfig { weight_decay: 0.5, ..config() });
    let (after, _) = step(&mut optimizer, model(), &sum, 0.1).unwrap();
    for (b, a) in before.iter().zip(after.parameters()) {
        let factor = if b.shape.len() > 1 { 0.95 } else { 1.0 };
        assert!(b.data.iter().zip(&a.data).all(|(b, a)| (b * factor - a).abs() < 1e-6), "{}", b.name);
    }
}

#[test]
fn accumulated_micro_batches_add_up() {
    let model = model();
    let whole = gradients(&model, &[1, 5, 9]);
    let mut twice = gradients(&model, &[1, 5, 9]);
    let hidden = model.forward(&PackedBatch::new(&[[1u32, 5, 9]]).unwrap()).unwrap();
    let logits = hidden.reshape([3, 16]).matmul(model.lm_head().unwrap().transpose());
    twice.add(&model, logits.square().sum().backward());
    for (a, b) in whole.parameters().iter().zip(twice.parameters()) {
        assert!(a.data.iter().zip(&b.data).all(|(a, b)| (2.0 * a - b).abs() <= 1e-5 * a.abs()), "{}", a.name);
    }
}

#[test]
fn a_restored_state_continues_bit_for_bit() {
    let mut optimizer = AdamW::new(&config());
    let mut policy = model();
    for ids in [[1u32, 5, 9], [1, 7, 8]] {
        let sum = gradients(&policy, &ids);
        policy = step(&mut optimizer, policy, &sum, RATE).unwrap().0;
    }
    let mut restored = AdamW::new(&config());
    restored.restore(optimizer.steps(), &state(&optimizer), &policy).unwrap();
    let sum = gradients(&policy, &[1, 20, 21]);
    let (a, report_a) = step(&mut optimizer, policy.clone(), &sum, RATE).unwrap();
    let (b, report_b) = step(&mut restored, policy.clone(), &sum, RATE).unwrap();
    assert_eq!(report_a, report_b);
    assert_ne!(a.parameters(), policy.parameters());
    for (a, b) in a.parameters().iter().zip(b.parameters()) {
        assert!(a.data.iter().zip(&b.data).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", a.name);
    }
    // A state that does not fit is rejected.
    let state = state(&optimizer);
    assert!(restored.restore(3, &&state[1..], &policy).is_err());
    assert!(restored.restore(3, &[], &policy).is_err());
    assert!(restored.restore(0, &state, &policy).is_err());
}

#[test]
fn a_gradient_that_is_not_finite_is_an_error() {
    let mut sum = gradients(&model(), &[1, 5]);
    sum.parameters[0].data[0] = f32::NAN;
    let result = step(&mut AdamW::new(&config()), model(), &sum, RATE);
    assert!(matches!(result, Err(Error::NotFinite { .. })));
}

/// Returns the state that an update may change.
fn snapshot(optimizer: &AdamW) -> (u64, Vec<NamedTensor>) {
    (optimizer.steps(), state(optimizer))
}

#[test]
fn an_update_above_the_limit_is_skipped_and_changes_nothing() {
    let small = gradients(&model(), &[1, 5]);
    let times = |factor: f32| {
        let mut sum = small.clone();
        sum.parameters.iter_mut().flat_map(|p| &mut p.data).for_each(|g| *g *= factor);
        sum
    };
    let guarded = || AdamW::new(&AdamWConfig { skip_grad_norm: Some(2.0 * small.norm()), ..config() });
    for bad in [times(3.0), times(f32::NAN), times(f32::INFINITY)] {
        // As the first step, and after an applied step.
        for steps in [0, 1] {
            let mut optimizer = guarded();
            (0..steps).for_each(|_| drop(step(&mut optimizer, model(), &small, RATE).unwrap()));
            let before = state(&optimizer);
            let (after, report) = step(&mut optimizer, model(), &bad, RATE).unwrap();
            assert!(!report.applied && report.grad_norm.to_bits() == bad.norm().to_bits());
            assert_eq!(after.parameters(), model().parameters());
            assert_eq!(snapshot(&optimizer), (steps, before));
            let (_, report) = step(&mut optimizer, model(), &times(1.5), RATE).unwrap();
            assert!(report.applied, "an update below the limit is applied");
            assert_eq!(optimizer.steps(), steps + 1);
        }
    }
    let mut optimizer = guarded();
    step(&mut optimizer, model(), &times(9.0), RATE).unwrap();
    // Skipped steps do not count in the bias correction of later ones.
    let (skipped_before, _) = step(&mut optimizer, model(), &small, RATE).unwrap();
    let (first, _) = step(&mut guarded(), model(), &small, RATE).unwrap();
    assert_eq!(skipped_before.parameters(), first.parameters());
}

#[test]
fn an_update_that_overflows_is_an_error_and_changes_nothing() {
    let sum = gradients(&model(), &[1, 5]);
    // Weights overflow by the learning rate; a second moment overflows by a large gradient.
    let fast = (AdamW::new(&config()), 1e38);
    let mut steep = sum.clone();
    steep.parameters[0].data[0] = 1e30;
    let unclipped = (AdamW::new(&AdamWConfig { max_grad_norm: 0.0, ..config() }), RATE);
    for ((mut optimizer, rate), sum) in [(fast, sum), (unclipped, steep)] {
        let before = snapshot(&optimizer);
        let error = step(&mut optimizer, model(), &sum, rate).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }), "{error}");
        assert_eq!(snapshot(&optimizer), before);
    }
}

#[test]
fn weights_or_moments_that_are_not_finite_are_an_error() {
    let sum = gradients(&model(), &[1, 5]);
    let mut optimizer = AdamW::new(&config());
    let (policy, _) = step(&mut optimizer, model(), &sum, RATE).unwrap();
    let (steps, state) = snapshot(&optimizer);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e20] {
        // A bad weight, imported after a step with known bounds.
        let spoilt = update_parameters(policy.clone(), |_, _, values| values[3] = bad);
        let result = step(&mut optimizer, spoilt, &sum, RATE);
        assert_eq!(result.is_err(), !bad.is_finite(), "a weight of {bad}");
        // A bad moment in a checkpoint.
        for of in MOMENTS {
            let mut state = state.clone();
            state.iter_mut().find(|t| t.name.starts_with(of)).unwrap().data[0] = bad;
            let mut restored = AdamW::new(&config());
            restored.restore(steps, &state, &policy).unwrap();
            let result = step(&mut restored, policy.clone(), &sum, RATE);
            assert_eq!(result.is_err(), !bad.is_finite(), "{of} {bad}");
        }
        optimizer.restore(steps, &state, &policy).unwrap();
    }
    let mut negative = state;
    negative.iter_mut().find(|t| t.name.starts_with(MOMENTS[1])).unwrap().data[0] = -1.0;
    optimizer.restore(steps, &negative, &policy).unwrap();
    assert!(step(&mut optimizer, policy, &sum, RATE).is_err(), "the root of a negative second moment");
}
