//! With old log-probabilities from `score`, every on-policy ratio is exactly 1, for every split of the step.

use crate::evaluation::Output;
use crate::{SMALL, backend, implementations, on_mesh, optimised};
use grpo_backend_tpu::PjrtBackend;
use grpo_core::aggregate::token_weights;
use grpo_core::{Dtype, GradientSpec, LossConfig, LossPlan};
use grpo_testkit::{Case, Shape, config};
use rstest::rstest;

/// Returns losses that clip every ratio other than 1, and whose KL is 0 only at a ratio of 1.
fn strict(loss_type: &str) -> LossConfig {
    config(&format!(
        r#"{{"loss_type": "{loss_type}", "epsilon_low": 0.0, "epsilon_high": 0.0, "beta": 0.1, "temperature": 0.7}}"#
    ))
}

/// Returns the same loss with a logit scale and a softcap.
fn capped(loss_type: &str) -> LossConfig {
    LossConfig { logit_scale: 1.3, final_logit_softcapping: Some(5.0), ..strict(loss_type) }
}

/// Scores the whole step, then computes the loss of the parts between `cuts`.
fn assert_on_policy(name: &str, plan: &mut dyn LossPlan, case: &Case, loss: &LossConfig, cuts: &[usize]) {
    let scores = plan.score(case.policy(), &case.batch).unwrap();
    let weights = token_weights(loss, &case.batch).unwrap();
    let step = case.with_batch(|batch| {
        let batch = batch.with_old_logp(scores.logp.clone()).unwrap().with_ref_logp(scores.logp.clone()).unwrap();
        batch.with_weights(weights).unwrap()
    });
    for cut in cuts.windows(2) {
        let part = step.select(cut[0]..cut[1]);
        let spec = GradientSpec { hidden: true, lm_head: true, bias: case.bias.is_some() };
        let mut output = Output::begin(&part.oracle(loss), spec);
        output.add(plan, &part);
        assert_eq!(output.scores.logp, part.batch.old_logp().unwrap(), "{name}, sequences {cut:?}");
        for metric in ["clip_ratio/region_mean", "kl"] {
            assert!(output.metrics.value(metric).is_none_or(|value| value == 0.0), "{name}: {metric} {output:?}");
        }
    }
}

fn check(backend: &PjrtBackend, loss_type: &str, dtype: Dtype, shape: &Shape<'_>) {
    check_loss(backend, &strict(loss_type), dtype, shape);
    check_loss(backend, &capped(loss_type), dtype, &Shape { temperatures: true, ..*shape });
}

fn check_loss(backend: &PjrtBackend, loss: &LossConfig, dtype: Dtype, shape: &Shape<'_>) {
    let case = Case::new(loss, &Shape { dtype, bias: true, ..*shape }, 47);
    for (name, implementation, tiling) in implementations() {
        let mut plan = backend.plan_on_device(&case.request(loss, implementation, tiling)).unwrap();
        let cap = loss.final_logit_softcapping;
        let name = format!("{name} {:?} cap {cap:?} {}", loss.loss_type, dtype.name());
        assert_on_policy(&name, &mut plan, &case, loss, &[0, shape.lengths.len()]);
        assert_on_policy(&name, &mut plan, &case, loss, &[0, 1, 3, 4, 5]);
    }
}

#[rstest]
#[case("gspo", Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case("gspo", Dtype::F32)]
#[ignore = "GRPO_TESTS=all"]
#[case("dapo", Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
#[case("dapo", Dtype::F32)]
fn on_policy_ratios_are_exactly_one(#[case] loss_type: &str, #[case] dtype: Dtype) {
    check(&backend(), loss_type, dtype, &SMALL);
}

/// With the compiler's own fusions, and with products large enough for its libraries.
const LARGE: Shape<'static> = Shape { lengths: &[9, 20, 1, 33, 10], h: 160, v: 1013, ..SMALL };

#[test]
fn on_policy_ratios_are_exactly_one_in_optimised_programs() {
    check_loss(&optimised(), &strict("gspo"), Dtype::F32, &LARGE);
}

#[rstest]
#[case::of_tokens("dapo", Dtype::F32)]
#[case::of_sequences("gspo", Dtype::Bf16)]
#[ignore = "GRPO_TESTS=all"]
fn on_policy_ratios_are_exactly_one_in_all_optimised_programs(#[case] loss_type: &str, #[case] dtype: Dtype) {
    check(&optimised(), loss_type, dtype, &LARGE);
}

#[rstest]
#[case("dapo")]
#[ignore = "GRPO_TESTS=all"]
#[case("gspo")]
fn on_policy_ratios_are_exactly_one_on_a_mesh(#[case] loss_type: &str) {
    check(&on_mesh(2, 2), loss_type, Dtype::F32, &SMALL);
}

/// Without old log-probabilities, the current policy is the old one, and the result is the same.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case(strict("dapo"))]
#[case(strict("gspo"))]
fn missing_old_log_probabilities_default_to_the_current_ones(#[case] loss: LossConfig) {
    let case = Case::new(&loss, &SMALL, 3);
    for (name, implementation, tiling) in implementations() {
        let mut plan = backend().plan_on_device(&case.request(&loss, implementation, tiling)).unwrap();
        let logp = plan.score(case.policy(), &case.batch).unwrap().logp;
        let rebuilt = |case: &Case, old: Option<Vec<f32>>| {
            case.with_batch(|batch| {
                let mask: Vec<f32> = (0..batch.tokens()).map(|i| f32::from(u8::from(batch.is_active(i)))).collect();
                let plain = grpo_core::TokenBatch::packed(batch.targets().to_vec(), batch.offsets().to_vec()).unwrap();
                let plain = plain.with_mask(&mask).unwrap().with_advantages(batch.advantages().clone()).unwrap();
                let plain = plain.with_ref_logp(batch.ref_logp().unwrap().to_vec()).unwrap();
                old.map_or(plain.clone(), |old| plain.with_old_logp(old).unwrap())
            })
        };
        let begin = Output::begin(&case.oracle(&loss), GradientSpec::default());
        let outputs = [None, Some(logp)].map(|old| {
            let case = rebuilt(&case, old);
            let mut output = begin.clone();
            output.add(&mut plan, &case);
            output
        });
        let [a, b] = &outputs;
        assert_eq!((a.loss, &a.scores, &a.metrics), (b.loss, &b.scores, &b.metrics), "{name}");
        assert_eq!((&a.hidden, &a.lm_head), (&b.hidden, &b.lm_head), "{name}");
    }
}
