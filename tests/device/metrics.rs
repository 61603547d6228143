//! TRL's metrics, and steps of several micro-batches.

use crate::evaluation::Output;
use crate::{SMALL, backend, cispo, grpo, gspo, implementations};
use grpo_backend_cpu::CpuBackend;
use grpo_core::aggregate::token_weights;
use grpo_core::parity::Tolerances;
use grpo_core::{Advantages, Backend, Dtype, LossConfig, Metric};
use grpo_testkit::margin::assert_below;
use grpo_testkit::{Case, Shape, config};
use rstest::rstest;

/// Compares sums and counts of every metric with the CPU backend, so that micro-batches merge to the same values.
#[rstest]
#[case::grpo(grpo(), false)]
#[ignore = "GRPO_TESTS=all"]
#[case::cispo(cispo(), false)]
#[ignore = "GRPO_TESTS=all"]
#[case::gspo(gspo(), false)]
#[case::gspo_with_token_advantages(gspo(), true)]
#[ignore = "GRPO_TESTS=all"]
#[case::sequence_level_cispo(
    config(r#"{"loss_type": "cispo", "epsilon_high": 1.05, "importance_sampling_level": "sequence"}"#),
    false
)]
fn metrics_match_the_cpu_backend(#[case] loss: LossConfig, #[case] per_token: bool) {
    let shape = Shape { lengths: &[9, 0, 8, 11, 3], ..SMALL };
    let cases = (0..32).map(|seed| {
        let case = Case::new(&loss, &shape, seed);
        let list = (0..case.tokens()).map(|i| [1.2, -0.7, 0.4][i % 3]).collect();
        match per_token {
            true => case.with_batch(|batch| batch.with_advantages(Advantages::PerToken(list)).unwrap()),
            false => case,
        }
    });
    // Some tokens are clipped, but not all.
    let clips = |case: &Case| {
        let metrics = case.oracle(&loss).metrics;
        ["clip_ratio/high_mean", "cispo_clip_ratio"]
            .iter()
            .any(|m| metrics.value(m).is_some_and(|c| c > 0.0 && c < 1.0))
    };
    let case = cases.into_iter().find(clips).unwrap();
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let [found, expected] =
            [backend().plan(&request).unwrap(), CpuBackend::with_threads(1).unwrap().plan(&request).unwrap()].map(
                |mut plan| {
                    let mut output = Output::begin(&case.oracle(&loss), request.gradients);
                    output.add(&mut *plan, &case);
                    output.metrics
                },
            );
        for (metric, _) in expected.values() {
            let (found, expected) = (found.get(metric), expected.get(metric).unwrap());
            let (a, b) = match (found, expected) {
                (Some(Metric::Mean { sum, count }), Metric::Mean { sum: s, count: c }) if count == c => (sum, s),
                (Some(Metric::Min(a)), Metric::Min(b)) | (Some(Metric::Max(a)), Metric::Max(b)) => (a, b),
                _ => panic!("{name} {metric}: {found:?} and should be {expected:?}"),
            };
            assert_below(&format!("{name}, {metric}"), (a - b).abs() / b.abs().max(1.0), 1e-5);
        }
        assert_eq!(found.values().count(), expected.values().count());
    }
}

/// The micro-batches of a step add up to the step: their gradients accumulate in the same buffers.
#[rstest]
#[case(gspo(), Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case(gspo(), Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), Dtype::Bf16)]
fn micro_batches_add_up_to_the_step_on_pjrt(#[case] loss: LossConfig, #[case] dtype: Dtype) {
    let case = Case::new(&loss, &Shape { dtype, bias: true, ..SMALL }, 17);
    let weights = token_weights(&loss, &case.batch).unwrap();
    let case = case.with_batch(|batch| batch.with_weights(weights).unwrap());
    let expected = case.oracle(&loss);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = backend().plan_on_device(&request).unwrap();
        let begin = Output::begin(&expected, request.gradients);
        let mut sum = begin.clone();
        let (mut hidden, whole) = (vec![], sum.hidden.take().unwrap());
        let mut scores = grpo_core::Scores::default();
        for cut in [0, 1, 3, 4, 5].windows(2) {
            let part = case.select(cut[0]..cut[1]);
            let rows = case.batch.offsets()[cut[0]] * 12..case.batch.offsets()[cut[1]] * 12;
            sum.hidden = Some(whole[rows].to_vec());
            sum.add(&mut plan, &part);
            hidden.append(sum.hidden.as_mut().unwrap());
            scores.logp.append(&mut sum.scores.logp);
            scores.entropy.append(&mut sum.scores.entropy);
        }
        (sum.hidden, sum.scores) = (Some(hidden), scores);
        let name = format!("{:?} {name}", loss.loss_type);
        sum.assert_is(&name, &case, &expected, &begin, &Tolerances::of(dtype));
    }
}
