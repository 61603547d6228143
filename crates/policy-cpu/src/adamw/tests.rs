//! Skipped and failing steps. The tests of checkpoints compare steps with torch, and the contract of policies tests saved states.

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
fn gradients() -> GradientSum {
    let model = model();
    let hidden = model.forward(&PackedBatch::new(&[[1, 5]]).unwrap()).unwrap();
    let logits = hidden.matmul(model.lm_head().unwrap().transpose());
    let mut sum = GradientSum::new();
    sum.add(&model, logits.square().sum().backward());
    sum
}

/// Returns the state that an update may change.
fn snapshot(optimizer: &AdamW) -> (u64, Vec<NamedTensor>) {
    let mut tensors = Vec::new();
    optimizer.export(&model(), &mut tensors).unwrap();
    (optimizer.steps, tensors)
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
fn an_update_above_the_limit_is_skipped_and_changes_nothing() {
    let small = gradients();
    let times = |factor: f32| {
        let mut sum = small.clone();
        sum.parameters.iter_mut().flat_map(|p| &mut p.data).for_each(|g| *g *= factor);
        sum
    };
    let guarded = || AdamW::new(&AdamWConfig { skip_grad_norm: Some(2.0 * small.norm()), ..Default::default() });
    for bad in [times(3.0), times(f32::NAN), times(f32::INFINITY)] {
        // As the first step, and after an applied step.
        for steps in [0, 1] {
            let mut optimizer = guarded();
            (0..steps).for_each(|_| drop(step(&mut optimizer, model(), &small, RATE).unwrap()));
            let before = snapshot(&optimizer);
            let (after, report) = step(&mut optimizer, model(), &bad, RATE).unwrap();
            assert!(!report.applied && report.grad_norm.to_bits() == bad.norm().to_bits());
            assert_eq!((after.parameters(), snapshot(&optimizer)), (model().parameters(), before));
            let (next, report) = step(&mut optimizer, model(), &times(1.5), RATE).unwrap();
            assert!(report.applied && optimizer.steps == steps + 1, "an update below the limit is applied");
            // Skipped steps do not count in the bias correction of later ones.
            let mut other = guarded();
            (0..steps).for_each(|_| drop(step(&mut other, model(), &small, RATE).unwrap()));
            assert_eq!(next.parameters(), step(&mut other, model(), &times(1.5), RATE).unwrap().0.parameters());
        }
    }
}

#[test]
fn an_update_that_is_not_finite_is_an_error_and_changes_nothing() {
    let sum = gradients();
    // Weights overflow by the learning rate; a second moment overflows by a large gradient.
    let fast = (AdamW::new(&AdamWConfig::default()), 1e38);
    let (mut steep, mut unknown) = (sum.clone(), sum.clone());
    steep.parameters[0].data[0] = 1e30;
    unknown.parameters[0].data[0] = f32::NAN;
    let unclipped = (AdamW::new(&AdamWConfig { max_grad_norm: 0.0, ..Default::default() }), RATE);
    for ((mut optimizer, rate), sum) in [(fast.clone(), sum), (unclipped, steep), (fast, unknown)] {
        let before = snapshot(&optimizer);
        let error = step(&mut optimizer, model(), &sum, rate).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }), "{error}");
        assert_eq!(snapshot(&optimizer), before);
    }
}

#[test]
fn weights_or_moments_that_are_not_finite_are_an_error() {
    let sum = gradients();
    let mut optimizer = AdamW::new(&AdamWConfig::default());
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
            let mut restored = AdamW::new(&AdamWConfig::default());
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
