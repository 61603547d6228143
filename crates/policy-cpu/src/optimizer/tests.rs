//! Skipped and failing steps. The tests of checkpoints compare steps with torch, and the contract of policies tests saved states.

use super::*;
use crate::decoder::PackedBatch;
use burn::tensor::Device;
use grpo_models::ModelConfig;

/// Learning rate of tests whose result does not depend on it.
const RATE: f64 = 7e-4;

/// Returns a model in which some tensors have 8-bit moments with `adamw_8bit`.
fn model() -> Decoder {
    let config = ModelConfig { hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, ..Default::default() };
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
fn snapshot(optimizer: &Optimizer) -> (u64, Vec<NamedTensor>) {
    let mut tensors = Vec::new();
    optimizer.export(&model(), &mut tensors).unwrap();
    (optimizer.steps, tensors)
}

/// Applies one step to `model` and returns it.
fn step(
    optimizer: &mut Optimizer,
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
    let guarded = |name| {
        Optimizer::new(&OptimizerSettings { name, skip_grad_norm: Some(2.0 * small.norm()), ..Default::default() })
    };
    let all = [times(3.0), times(f32::NAN), times(f32::INFINITY)];
    // As the first step, and after an applied step.
    let cases = all.iter().flat_map(|bad| [(bad, 0), (bad, 1)]);
    for ((bad, steps), name) in cases.flat_map(|case| OptimizerName::ALL.map(|name| (case, name))) {
        let mut optimizer = guarded(name);
        (0..steps).for_each(|_| drop(step(&mut optimizer, model(), &small, RATE).unwrap()));
        let before = snapshot(&optimizer);
        let (after, report) = step(&mut optimizer, model(), bad, RATE).unwrap();
        assert!(!report.applied && report.grad_norm.to_bits() == bad.norm().to_bits());
        assert_eq!((after.parameters(), snapshot(&optimizer)), (model().parameters(), before));
        let (next, report) = step(&mut optimizer, model(), &times(1.5), RATE).unwrap();
        assert!(report.applied && optimizer.steps == steps + 1, "an update below the limit is applied");
        // Skipped steps do not count in the bias correction of later ones.
        let mut other = guarded(name);
        (0..steps).for_each(|_| drop(step(&mut other, model(), &small, RATE).unwrap()));
        assert_eq!(next.parameters(), step(&mut other, model(), &times(1.5), RATE).unwrap().0.parameters());
    }
}

#[test]
fn an_update_that_is_not_finite_is_an_error_and_changes_nothing() {
    let sum = gradients();
    // Weights overflow by the learning rate; a second moment overflows by a large gradient.
    let (mut steep, mut unknown) = (sum.clone(), sum.clone());
    steep.parameters[0].data[0] = 1e30;
    unknown.parameters[0].data[0] = f32::NAN;
    for name in OptimizerName::ALL {
        let of = |max_grad_norm| Optimizer::new(&OptimizerSettings { name, max_grad_norm, ..Default::default() });
        // A buffer of momentum holds no squares.
        let has_squares = Rule::of_elements(name).slots().iter().any(|slot| slot.is_squared);
        let steep = has_squares.then_some((0.0, RATE, &steep));
        for (max_grad_norm, rate, bad) in [(1.0, 1e39, &sum), (1.0, 1e39, &unknown)].into_iter().chain(steep) {
            let mut optimizer = of(max_grad_norm);
            for _ in 0..2 {
                let before = snapshot(&optimizer);
                let error = step(&mut optimizer, model(), bad, rate).unwrap_err();
                assert!(matches!(error, Error::NotFinite { .. }), "{error}");
                assert_eq!(snapshot(&optimizer), before);
                // Again after an applied step.
                step(&mut optimizer, model(), &sum, RATE).unwrap();
            }
        }
    }
}

#[test]
fn weights_or_moments_that_are_not_finite_are_an_error() {
    let sum = gradients();
    for name in OptimizerName::ALL {
        let config = OptimizerSettings { name, ..Default::default() };
        let mut optimizer = Optimizer::new(&config);
        let (policy, _) = step(&mut optimizer, model(), &sum, RATE).unwrap();
        let (steps, state) = snapshot(&optimizer);
        let slots = Rule::of_optimizer(name).iter().flat_map(|rule| rule.slots());
        let of_values: Vec<&str> = slots.flat_map(|slot| [slot.single, slot.eight_bit[1]]).collect();
        let there = |prefix: &&str| state.iter().any(|tensor| tensor.name.starts_with(prefix));
        let of_values: Vec<&str> = of_values.into_iter().filter(there).collect();
        let slots = Rule::of_optimizer(name).iter().map(|rule| rule.slots().len()).sum::<usize>();
        let expected = if name.is_eight_bit() { 2 * slots } else { slots };
        assert_eq!(of_values.len(), expected);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e20] {
            // A bad weight, imported after a step with known bounds.
            let spoilt = update_parameters(policy.clone(), |_, _, values| values[3] = bad);
            let result = step(&mut optimizer, spoilt, &sum, RATE);
            assert_eq!(result.is_err(), !bad.is_finite(), "a weight of {bad}");
            // A bad moment, or the scale of a block of moments, in a checkpoint.
            for of in &of_values {
                let mut state = state.clone();
                state.iter_mut().find(|t| t.name.starts_with(of)).unwrap().data[0] = bad;
                let mut restored = Optimizer::new(&config);
                restored.restore(steps, &state, &policy).unwrap();
                let result = step(&mut restored, policy.clone(), &sum, RATE);
                assert_eq!(result.is_err(), !bad.is_finite(), "{of} {bad}");
            }
            optimizer.restore(steps, &state, &policy).unwrap();
        }
        for of in of_values.iter().filter(|of| of.starts_with("exp_avg_sq")) {
            let mut negative = state.clone();
            negative.iter_mut().find(|t| t.name.starts_with(of)).unwrap().data[0] = -1.0;
            optimizer.restore(steps, &negative, &policy).unwrap();
            assert!(step(&mut optimizer, policy.clone(), &sum, RATE).is_err(), "{of}: the root of a negative number");
        }
    }
}
