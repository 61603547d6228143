//! Masked tokens have no effect: NaN in them does not spread, and their gradients do not change.

use crate::evaluation::{Output, check, check_on};
use crate::{SMALL, backend, grpo, gspo, implementations, on_mesh, softcap};
use grpo_core::batch::SamplingMask;
use grpo_core::{
    Advantages, Backend, GradientSpec, GradsMut, Implementation, LossConfig, LossPlan, PlanRequest, PolicyInput,
    PolicySpec, Tiling,
};
use grpo_testkit::margin::assert_below;
use grpo_testkit::{Case, Shape};
use rstest::rstest;

/// Returns the case with advantages per token, NaN at masked tokens. Hidden states and log-probabilities of a case are always poisoned.
fn with_token_advantages(case: &Case) -> Case {
    case.with_batch(|batch| {
        let at = |i: usize| if batch.is_active(i) { [1.2, -0.7, 0.4][i % 3] } else { f32::NAN };
        let list = (0..batch.tokens()).map(at).collect();
        batch.with_advantages(Advantages::PerToken(list)).unwrap()
    })
}

/// Nothing of a masked token reaches the loss, the gradients of other tokens or the metrics: these match the oracle's, which does
/// not read masked tokens.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
fn nan_in_masked_tokens_does_not_spread(#[case] loss: LossConfig) {
    let case = with_token_advantages(&Case::new(&loss, &Shape { bias: true, ..SMALL }, 13));
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        check_on(&backend(), &format!("{:?} {name}", loss.loss_type), &case, &request);
    }
}

/// Tokens that were sampled from a part of the vocabulary: the softmax of every head is over its ids, also in sharded panels and in
/// panels whose last one overlaps.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
#[ignore = "GRPO_TESTS=all"]
#[case::softcap(softcap())]
fn sampling_masks_match_the_oracle(#[case] loss: LossConfig) {
    let case = Case::new(&loss, &Shape { bias: true, sampling_mask: true, ..SMALL }, 17);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        check_on(&backend(), &format!("{:?} {name}", loss.loss_type), &case, &request);
    }
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        check_on(&on_mesh(2, 2), &format!("{:?} {name} on a mesh", loss.loss_type), &case, &request);
    }
}

/// One plan serves batches with and without a sampling mask, and the log-probabilities of scores and losses have equal bits.
#[test]
fn a_plan_takes_batches_with_and_without_a_sampling_mask() {
    let loss = gspo();
    let masked = Case::new(&loss, &Shape { sampling_mask: true, ..SMALL }, 3);
    let whole = masked.with_batch(|batch| {
        let mut mask = SamplingMask::default();
        mask.resize(batch.tokens());
        batch.with_sampling_mask(mask).unwrap()
    });
    let plain = Case::new(&loss, &SMALL, 3);
    for (name, implementation, tiling) in implementations() {
        let mut plan = backend().plan(&masked.request(&loss, implementation, tiling)).unwrap();
        let mut score = |case: &Case| plan.score(case.policy(), &case.batch).unwrap();
        let (of_masked, of_whole, of_plain) = (score(&masked), score(&whole), score(&plain));
        assert_ne!(of_masked.logp, of_whole.logp, "{name}");
        assert!(of_plain.logp.iter().all(|logp| logp.is_finite()), "{name}");
        let old = masked.with_batch(|batch| batch.with_old_logp(of_masked.logp).unwrap());
        let metrics = grpo_testkit::run(&mut *plan, &old).metrics;
        assert_eq!(["is_ratio/min", "is_ratio/max"].map(|bound| metrics.value(bound)), [Some(1.0); 2], "{name}");
    }
}

/// A batch without active tokens has loss 0 and does not change any gradient, NaN or not.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case((1, 1))]
#[case((2, 2))]
fn batch_without_active_tokens_changes_no_gradient(#[case] (data, vocab): (usize, usize)) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &Shape { bias: true, ..SMALL }, 5);
        let expected = case.oracle(&loss);
        let masked = case.with_batch(|batch| batch.with_mask(&vec![0.0; case.tokens()]).unwrap());
        let poisoned = Case { hidden: case.hidden.with(|hidden| hidden.fill(f32::NAN)), ..masked };
        for (name, implementation, tiling) in implementations() {
            let request = poisoned.request(&loss, implementation, tiling);
            let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
            let begin = Output::begin(&expected, request.gradients);
            let mut output = begin.clone();
            output.add(&mut plan, &poisoned);
            assert_eq!(output.loss, 0.0, "{name}");
            assert!(output.scores.logp.iter().chain(&output.scores.entropy).all(|x| *x == 0.0), "{name}");
            assert_eq!(
                (output.hidden, output.lm_head, output.bias),
                (begin.hidden, begin.lm_head, begin.bias),
                "{name}"
            );
            crate::evaluation::assert_metrics("masked", &output.metrics, &poisoned.oracle(&loss).metrics);
        }
    }
}

/// Batches smaller than planned, including an empty one.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case((1, 1))]
#[case((4, 2))]
fn plan_accepts_smaller_batches(#[case] (data, vocab): (usize, usize)) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &SMALL, 21);
        for (name, implementation, tiling) in implementations() {
            let request = PlanRequest { max_tokens: 37, ..case.request(&loss, implementation, tiling) };
            let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
            for sequences in [0..5, 3..5, 0..1] {
                let part = case.select(sequences.clone());
                let name = format!("{name} sequences {sequences:?} of a plan for 37 tokens");
                check(&name, &mut plan, &part, &loss, request.gradients);
            }
            let none = case.select(1..2);
            assert_eq!(none.tokens(), 0);
            let mut output = Output::begin(&case.oracle(&loss), GradientSpec { hidden: false, ..request.gradients });
            let (begin, mut nothing) = (output.clone(), Vec::<f32>::new());
            let grads = GradsMut { hidden: Some((&mut nothing).into()), ..output.grads() };
            let result = plan.value_and_grad(none.policy(), &none.batch, grads).unwrap();
            assert_eq!((result.loss, result.scores.logp.len()), (0.0, 0));
            assert_eq!(output.lm_head, begin.lm_head);
        }
    }
}

/// Precomputed logits: rows of masked tokens hold NaN, and their gradients are not written.
#[rstest]
fn masked_logits_are_not_read_on_pjrt(
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &SMALL, 9);
        let expected = case.oracle(&loss);
        let (n, v) = (case.tokens(), case.v);
        let logits = crate::logits::logits(&case);
        assert!(logits.iter().any(|z| z.is_nan()));
        let request = PlanRequest {
            policy: PolicySpec::Logits { vocab: v, dtype: case.dtype() },
            ..case.request(&loss, implementation, Tiling::default())
        };
        let mut plan = backend().plan_on_device(&request).unwrap();
        let mut grad = vec![0.0; n * v];
        let grads = GradsMut { logits: Some((&mut grad).into()), ..GradsMut::default() };
        let output = plan.value_and_grad(PolicyInput::Logits(logits.as_ref()), &case.batch, grads).unwrap();
        assert_below("loss", (output.loss - expected.loss).abs(), 2e-6);
        for i in (0..n).filter(|i| !case.batch.is_active(*i)) {
            assert!(grad[i * v..(i + 1) * v].iter().all(|g| *g == 0.0), "row {i}");
        }
    }
}
