//! Values at masked positions.

use super::*;
use grpo_testkit::family::{LOSSES, others};
use grpo_testkit::{EXACT, Shape, config, difference, loss};
use rstest::rstest;

/// No loss reads the NaN and infinity that all lists have at masked tokens. A product with the mask would.
#[test]
fn masked_positions_are_not_read_by_any_loss() {
    let backend = CpuBackend::with_threads(2).unwrap();
    for (name, (how, implementation, tiling)) in
        LOSSES.into_iter().chain(others()).zip(implementations().into_iter().cycle())
    {
        let loss = loss(name);
        let clean = Case::new(&loss, &Shape { lengths: &[9, 1, 14], temperatures: true, ..Shape::default() }, 71);
        let masked: Vec<usize> = (0..clean.batch.tokens()).filter(|row| !clean.batch.is_active(*row)).collect();
        assert!(masked.len() > 3);
        let with = |values: [f32; 5]| {
            let list = |list: Option<&[f32]>, value: f32| {
                let mut list = list.map(<[f32]>::to_vec)?;
                masked.iter().for_each(|row| list[*row] = value);
                Some(list)
            };
            let hidden = clean.hidden.with(|hidden| {
                masked.iter().for_each(|row| hidden[row * clean.h..(row + 1) * clean.h].fill(values[0]));
            });
            let from = &clean.batch;
            let mut batch = from.clone();
            batch = batch.with_old_logp(list(from.old_logp(), values[1]).unwrap()).unwrap();
            batch = batch.with_ref_logp(list(from.ref_logp(), values[2]).unwrap()).unwrap();
            batch = batch.with_temperatures(list(from.temperatures(), values[3]).unwrap()).unwrap();
            if let Some(sampler) = list(from.sampler_logp(), values[4]) {
                batch = batch.with_sampler_logp(sampler).unwrap();
            }
            Case { hidden, batch, ..clean.clone() }
        };
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let poisons = [[nan; 5], [inf; 5], [-inf; 5], [inf, -inf, nan, 0.0, -inf], [-inf, nan, 200.0, nan, inf]];
        let mut plan = plan(&backend, &clean.request(&loss, implementation, tiling));
        let expected = run(&mut *plan, &with([0.5, -1.0, -1.0, 1.0, -1.0]));
        assert!(expected.loss.is_finite());
        for poison in poisons {
            let got = run(&mut *plan, &with(poison));
            let what = format!("{name}, {how}, {poison:?}");
            assert_eq!(
                (got.loss, &got.scores, &got.metrics),
                (expected.loss, &expected.scores, &expected.metrics),
                "{what}"
            );
            assert_eq!((&got.hidden, &got.lm_head), (&expected.hidden, &expected.lm_head), "{what}");
            // Naive: a ratio at every token, times the mask.
            let (logp, mask) = (&got.scores.logp, clean.batch.mask());
            let case = with(poison);
            let old = case.batch.old_logp().unwrap();
            let naive: f32 = (0..logp.len()).map(|i| mask[i] * (logp[i] - old[i]).exp()).sum();
            // Only e^-inf is harmless.
            assert!(naive.is_nan() || poison[1] == inf, "{what}: naive is {naive}");
        }
    }
}

/// Precomputed logits and the gradient: it is 0 at masked tokens, for any logits.
#[rstest]
fn masked_logits_are_not_read(#[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX)] poison: f32) {
    let loss = config(r#"{"loss_type": "bnpo", "entropy_coef": 0.1}"#);
    let batch = sequence(&[1, 0, 2], 1.0).with_mask(&[1.0, 0.0, 1.0]).unwrap();
    let z = |poison: f32| [0.3, -0.2, 0.9, poison, poison, poison, 1.2, 0.1, -0.6];
    // Naive: softmax of the row, times the mask. Every value except for the last one gives NaN; the last one gives a gradient.
    let naive = 0.0 * (z(poison)[3] - z(poison)[4]).exp();
    assert!(naive.is_nan() || poison == f32::MAX);
    let expected = oracle(&loss, &z(0.0), 3, &batch);
    for (found, clean) in everywhere(&loss, &z(poison), 3, &batch).iter().zip(everywhere(&loss, &z(0.0), 3, &batch)) {
        assert_eq!((found.loss, &found.dz), (clean.loss, &clean.dz), "{}", found.how);
        assert_eq!(found.dz[3..6], [0.0; 3], "{}", found.how);
        assert!(difference(&found.dz, &expected.grad_logits) <= EXACT, "{}", found.how);
    }
}

/// Labels at masked positions may be anything; at an active position, an id outside of the vocabulary is an error with
/// its position.
#[rstest]
fn labels_matter_only_at_active_tokens(#[values(-100, -1, 3, i64::MAX, i64::MIN)] label: i64) {
    let loss = config(r#"{"loss_type": "bnpo"}"#);
    let z = [0.3, -0.2, 0.9, 0.5, 0.1, 0.4, 1.2, 0.1, -0.6, 0.7, 0.2, 0.6];
    let with = |label: i64| {
        TokenBatch::packed(vec![1, 0, label, 2], vec![0, 1, 4]).unwrap().with_advantages(vec![0.8, -1.2]).unwrap()
    };
    let mask = [1.0, 1.0, 0.0, 1.0];
    let (masked, expected) = (with(label).with_mask(&mask).unwrap(), with(0).with_mask(&mask).unwrap());
    for (got, expected) in everywhere(&loss, &z, 3, &masked).iter().zip(everywhere(&loss, &z, 3, &expected)) {
        assert_eq!((got.loss, &got.scores, &got.dz), (expected.loss, &expected.scores, &expected.dz), "{}", got.how);
    }

    let active = with(label);
    let case = identity(&z, 3, &active);
    for (how, implementation, tiling) in implementations() {
        let mut plan = plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling));
        let mut lm_head = vec![0.0; 12];
        let mut hidden = vec![0.0; 16];
        let grads = GradsMut {
            hidden: Some(hidden.as_mut_slice().into()),
            lm_head: Some(lm_head.as_mut_slice().into()),
            ..GradsMut::default()
        };
        let errors = [
            plan.score(case.policy(), &active).unwrap_err(),
            plan.value_and_grad(case.policy(), &active, grads).unwrap_err(),
        ];
        for error in errors {
            let message = error.to_string();
            let place = "targets at token 2 (sequence 1, position 1)";
            assert!(message.contains(place) && message.contains(&format!("id {label} ")), "{how}: {message}");
        }
        assert!(lm_head.iter().chain(&hidden).all(|g| *g == 0.0), "{how}");
    }
}
