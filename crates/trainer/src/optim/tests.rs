//! AdamW against hand-computed values, and its state against itself.

use super::*;
use crate::model::{ModelConfig, PaddedBatch};
use burn::tensor::Device;

fn model() -> Decoder {
    let config = ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() };
    Decoder::new(&config, 1, &Device::flex().autodiff()).unwrap()
}

/// Gradients of an arbitrary loss.
fn gradients(model: &Decoder, ids: &[u32]) -> GradientSum {
    let hidden = model.forward(&PaddedBatch::right_padded(&[ids]).unwrap()).unwrap();
    let logits = hidden.reshape([ids.len(), 16]).matmul(model.lm_head().transpose());
    let mut sum = GradientSum::new();
    sum.add(model, logits.square().sum().backward());
    sum
}

fn config() -> OptimizerConfig {
    OptimizerConfig { lr_scheduler_type: LrSchedulerType::Constant, warmup_ratio: 0.0, ..Default::default() }
}

#[test]
fn two_steps_match_values_computed_by_hand() {
    let rule = |root: f64, rate: f64| Rule {
        clip: 0.5,
        beta1: 0.9,
        beta2: 0.99,
        rate: rate as f32,
        root: root.sqrt() as f32,
        epsilon: 0.0,
    };
    let like = NamedTensor { name: "w".into(), shape: vec![2, 1], data: vec![0.0; 2] };
    let mut moments = Moments::zeros(&like);
    let mut w = [1.0f32, -2.0];
    // Step 1: g = (2, -4) / 2; m = 0.1 g; v = 0.01 g^2; the corrected ratio is the sign of g.
    rule(1.0 - 0.99, 0.1 / (1.0 - 0.9)).apply(&mut w, &[2.0, -4.0], 0.99, &mut moments);
    assert!((w[0] - (0.99 - 0.1)).abs() < 1e-6, "{w:?}");
    assert!((w[1] - (-1.98 + 0.1)).abs() < 1e-6, "{w:?}");
    assert!((moments.first[0] - 0.1).abs() < 1e-7 && (moments.second[1] - 0.04).abs() < 1e-7);
    // Step 2 with g = (0, 0): m = 0.09, m^ = 0.09 / 0.19; v = 0.0099, v^ = 0.0099 / 0.0199.
    let before = w[0];
    rule(1.0 - 0.99f64.powi(2), 0.1 / (1.0 - 0.81)).apply(&mut w, &[0.0, 0.0], 1.0, &mut moments);
    let expected = before - 0.1 * (0.09 / 0.19) / (0.0099f32 / 0.0199).sqrt();
    assert!((w[0] - expected).abs() < 1e-6, "{} {expected}", w[0]);
}

#[test]
fn clipping_uses_the_norm_of_the_whole_gradient() {
    let sum = gradients(&model(), &[1, 5, 9]);
    let by_hand: f64 = sum.parameters().iter().flat_map(|p| p.data.iter()).map(|g| f64::from(g * g)).sum();
    assert!((sum.norm() - by_hand.sqrt()).abs() < 1e-3 * sum.norm());
    // Adam's first step does not see a common factor, its moments do.
    let mut clipped = AdamW::new(&OptimizerConfig { max_grad_norm: 0.5, ..config() }, 10);
    let (_, report) = clipped.step(model(), &sum).unwrap();
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
    let mut optimizer = AdamW::new(&OptimizerConfig { weight_decay: 0.5, learning_rate: 0.1, ..config() }, 10);
    let (after, _) = optimizer.step(model(), &sum).unwrap();
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
    let hidden = model.forward(&PaddedBatch::right_padded(&[[1u32, 5, 9]]).unwrap()).unwrap();
    let logits = hidden.reshape([3, 16]).matmul(model.lm_head().transpose());
    twice.add(&model, logits.square().sum().backward());
    for (a, b) in whole.parameters().iter().zip(twice.parameters()) {
        assert!(a.data.iter().zip(&b.data).all(|(a, b)| (2.0 * a - b).abs() <= 1e-5 * a.abs()), "{}", a.name);
    }
}

#[test]
fn a_restored_state_continues_bit_for_bit() {
    let mut optimizer = AdamW::new(&OptimizerConfig::default(), 10);
    let mut policy = model();
    for ids in [[1u32, 5, 9], [1, 7, 8]] {
        let sum = gradients(&policy, &ids);
        policy = optimizer.step(policy, &sum).unwrap().0;
    }
    let mut restored = AdamW::new(&OptimizerConfig::default(), 10);
    restored.restore(optimizer.steps(), &optimizer.state(), &policy.parameters()).unwrap();
    let sum = gradients(&policy, &[1, 20, 21]);
    let (a, report_a) = optimizer.step(policy.clone(), &sum).unwrap();
    let (b, report_b) = restored.step(policy.clone(), &sum).unwrap();
    assert_eq!(report_a, report_b);
    assert_ne!(a.parameters(), policy.parameters());
    for (a, b) in a.parameters().iter().zip(b.parameters()) {
        assert!(a.data.iter().zip(&b.data).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", a.name);
    }
    // What does not fit is refused.
    let state = optimizer.state();
    assert!(restored.restore(3, &state[1..], &policy.parameters()).is_err());
    assert!(restored.restore(3, &[], &policy.parameters()).is_err());
    assert!(restored.restore(0, &state, &policy.parameters()).is_err());
}

#[test]
fn the_schedule_rises_then_falls_to_its_floor() {
    let with = |lr_scheduler_type| {
        let config = OptimizerConfig {
            learning_rate: 1.0,
            warmup_ratio: 0.1,
            min_lr_ratio: 0.2,
            lr_scheduler_type,
            ..Default::default()
        };
        AdamW::new(&config, 100)
    };
    let cosine = with(LrSchedulerType::Cosine);
    assert!((cosine.learning_rate_at(0) - 0.1).abs() < 1e-12);
    assert_eq!(cosine.learning_rate_at(10), 1.0);
    assert!((cosine.learning_rate_at(55) - 0.6).abs() < 1e-12);
    assert!((cosine.learning_rate_at(100) - 0.2).abs() < 1e-12);
    assert!((cosine.learning_rate_at(1000) - 0.2).abs() < 1e-12);
    assert!((with(LrSchedulerType::Linear).learning_rate_at(55) - 0.6).abs() < 1e-12);
    assert_eq!(with(LrSchedulerType::Constant).learning_rate_at(99), 1.0);
}

#[test]
fn a_gradient_that_is_not_finite_is_an_error() {
    let mut sum = gradients(&model(), &[1, 5]);
    sum.parameters[0].data[0] = f32::NAN;
    let result = AdamW::new(&config(), 10).step(model(), &sum);
    assert!(matches!(result, Err(Error::NotFinite { .. })));
}

/// Everything that an update may change.
fn snapshot(optimizer: &AdamW) -> (u64, Vec<NamedTensor>, u64) {
    (optimizer.steps(), optimizer.state(), optimizer.skipped_in_a_row())
}

#[test]
fn an_update_above_the_limit_is_skipped_and_leaves_everything_as_it_was() {
    let small = gradients(&model(), &[1, 5]);
    let times = |factor: f32| {
        let mut sum = small.clone();
        sum.parameters.iter_mut().flat_map(|p| &mut p.data).for_each(|g| *g *= factor);
        sum
    };
    let guarded = || {
        let config = OptimizerConfig { skip_grad_norm: Some(2.0 * small.norm()), max_consecutive_skips: 3, ..config() };
        AdamW::new(&config, 10)
    };
    for bad in [times(3.0), times(f32::NAN), times(f32::INFINITY)] {
        // At the first step and after one that was applied; a skipped step is none, for the schedule either.
        for steps in [0, 1] {
            let mut optimizer = guarded();
            (0..steps).for_each(|_| drop(optimizer.step(model(), &small).unwrap()));
            let before = optimizer.state();
            let (after, report) = optimizer.step(model(), &bad).unwrap();
            assert!(report.skipped && report.learning_rate == optimizer.learning_rate_at(optimizer.steps()));
            assert_eq!(after.parameters(), model().parameters());
            assert_eq!(snapshot(&optimizer), (steps, before, 1));
            assert!(!optimizer.step(model(), &times(1.5)).unwrap().1.skipped, "an update below the limit is applied");
            assert_eq!((optimizer.steps(), optimizer.skipped_in_a_row()), (steps + 1, 0));
        }
    }
    let mut optimizer = guarded();
    optimizer.step(model(), &times(9.0)).unwrap();
    optimizer.step(model(), &times(9.0)).unwrap();
    let before = snapshot(&optimizer);
    let error = optimizer.step(model(), &times(9.0)).unwrap_err();
    assert!(matches!(error, Error::TooManySkips { skipped: 3, .. }), "{error}");
    assert_eq!(snapshot(&optimizer), before);
    // The first step that is applied is a first step.
    let (skipped_before, _) = optimizer.step(model(), &small).unwrap();
    let (first, _) = guarded().step(model(), &small).unwrap();
    assert_eq!(skipped_before.parameters(), first.parameters());
}

#[test]
fn an_update_that_leaves_the_range_of_numbers_is_an_error_and_undone() {
    let sum = gradients(&model(), &[1, 5]);
    // Of the weights, by the learning rate; of the second moment, by a gradient whose square is too large.
    let fast = AdamW::new(&OptimizerConfig { learning_rate: 1e38, ..config() }, 10);
    let mut steep = sum.clone();
    steep.parameters[0].data[0] = 1e30;
    let unclipped = AdamW::new(&OptimizerConfig { max_grad_norm: 0.0, ..config() }, 10);
    for (mut optimizer, sum) in [(fast, sum), (unclipped, steep)] {
        let before = snapshot(&optimizer);
        let error = optimizer.step(model(), &sum).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }), "{error}");
        assert_eq!(snapshot(&optimizer), before);
    }
}
