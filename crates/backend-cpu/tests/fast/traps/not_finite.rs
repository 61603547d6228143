//! NaN and infinity at active tokens must appear in the loss, in the scores of the token and in the gradients, for
//! every loss and implementation. A clip with a comparison hides them: `ratio <= high` is false for NaN, so the bound
//! is used, whose derivative is 0, and a diverged policy trains on.

use super::*;
use grpo_testkit::cpu::backends;
use grpo_testkit::family::{LOSSES, others};
use grpo_testkit::{Output, Shape, config, loss};
use rstest::rstest;

/// Returns the tokens of `case` that contribute to the loss.
fn counted(loss: &LossConfig, case: &Case) -> Vec<usize> {
    let score = |batch: &TokenBatch| {
        case.with_policy(|policy| {
            let scores = grpo_backend_cpu::oracle::score(loss, policy, batch)?;
            Ok::<_, Error>(grpo_core::batch::PolicyValues { logp: scores.logp, entropy: scores.entropy })
        })
    };
    loss.prepare(&case.batch, score).unwrap().active_rows().to_vec()
}

/// Asserts that the non-finite hidden states of `row` are visible in its results, and that other tokens are unaffected.
fn assert_seen(out: &Output, case: &Case, row: usize, what: &str) {
    assert!(out.loss.is_nan(), "{what}: the loss is {}", out.loss);
    for other in case.batch.active_rows() {
        let (logp, entropy) = (out.scores.logp[*other], out.scores.entropy[*other]);
        assert_eq!((logp.is_nan(), entropy.is_nan()), (*other == row, *other == row), "{what}: token {other}: {logp}");
    }
    let gradient = &out.hidden[row * case.h..(row + 1) * case.h];
    assert!(gradient.iter().all(|g| g.is_nan()), "{what}: gradient of the token: {gradient:?}");
    assert!(out.lm_head.iter().any(|g| g.is_nan()), "{what}: the gradient of the head is finite");
    for name in ["entropy", "is_ratio/mean", "is_ratio/min", "is_ratio/max"] {
        assert!(out.metrics.value(name).is_none_or(f64::is_nan), "{what}: {name} is {:?}", out.metrics.value(name));
    }
    let message = out.scores.check_finite(&case.batch).unwrap_err().to_string();
    let sequence = (0..case.batch.sequences()).find(|b| case.batch.range(*b).contains(&row)).unwrap();
    let place = format!("token {row} (sequence {sequence}, position {})", row - case.batch.range(sequence).start);
    assert!(message.contains(&place) && message.contains("NaN"), "{what}: {message}");
}

/// Every token of every loss in turn, including clipped tokens, in every implementation.
#[rstest]
fn a_nan_is_not_treated_as_a_clipped_token(#[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] poison: f32) {
    let backend = CpuBackend::with_threads(2).unwrap();
    for name in LOSSES.into_iter().chain(others()) {
        let loss = loss(name);
        let case = Case::new(&loss, &Shape { lengths: &[4, 1, 5], h: 12, v: 41, ..Shape::default() }, 5);
        let rows = counted(&loss, &case);
        assert!(rows.len() > 3, "{name}");
        let clipped = case.oracle(&loss).grad_logits;
        let dead = |row: &&usize| clipped[**row * case.v..(**row + 1) * case.v].iter().all(|g| *g == 0.0);
        if name == "grpo" {
            assert!(rows.iter().filter(dead).count() > 0, "one of the tokens is clipped");
        }
        for implementation in Implementation::ALL {
            let mut plan = plan(&backend, &case.request(&loss, implementation, Tiling::default()));
            for row in &rows {
                let case = case.poisoned(*row, poison);
                let what = format!("{name}, {}, {poison} at token {row}", implementation.name());
                assert_seen(&run(&mut *plan, &case), &case, *row, &what);
            }
        }
        // The oracle must show it as well, because other tests compare with it.
        let case = case.poisoned(rows[0], poison);
        let truth = case.oracle(&loss);
        assert!(truth.loss.is_nan() && truth.logp[rows[0]].is_nan() && truth.entropy[rows[0]].is_nan(), "{name}");
        assert!(truth.grad_hidden[rows[0] * case.h..][..case.h].iter().all(|g| g.is_nan()), "{name}");
    }
}

/// Every blocking, instruction set, dtype and rounding, with a loss that clips tokens and one that clips sequences.
#[rstest]
fn every_kernel_propagates_nan(#[values("grpo", "gspo")] name: &str, #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let loss = loss(name);
    let case = Case::new(&loss, &Shape { lengths: &[9, 1, 14], v: 1030, dtype, bias: true, ..Shape::default() }, 5);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for (backend, _) in backends(dtype, 2) {
            let backend = backend.with_isa(isa);
            for (how, implementation, tiling) in implementations() {
                let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
                for row in [0, case.batch.active_rows()[7]] {
                    let case = case.poisoned(row, f32::NAN);
                    assert_seen(&run(&mut *plan, &case), &case, row, &format!("{name}, {}, {how}, {row}", isa.name()));
                }
            }
        }
    }
}

/// Precomputed logits: the results equal those of PyTorch's log_softmax, for non-finite logits at the target and
/// elsewhere.
#[rstest]
#[case::nan_beside_the_target([0.3, f32::NAN, 0.9], f64::NAN)]
#[case::nan_at_the_target([f32::NAN, 0.1, 0.9], f64::NAN)]
#[case::infinity_beside_the_target([0.3, f32::INFINITY, 0.9], f64::NAN)]
#[case::infinity_at_the_target([f32::INFINITY, 0.1, 0.9], f64::NAN)]
#[case::infinity_everywhere([f32::INFINITY; 3], f64::NAN)]
#[case::nothing_possible([f32::NEG_INFINITY; 3], f64::NAN)]
#[case::an_impossible_target([f32::NEG_INFINITY, 0.1, 0.9], f64::NEG_INFINITY)]
#[case::an_impossible_other([0.3, f32::NEG_INFINITY, 0.3], -std::f64::consts::LN_2)]
fn non_finite_logits_match_log_softmax(
    #[case] row: [f32; 3],
    #[case] logp: f64,
    #[values(-1.5, 1.5)] advantage: f32,
    #[values(0.0, 0.1)] entropy_coef: f64,
) {
    let loss = config(&format!(r#"{{"loss_type": "bnpo", "entropy_coef": {entropy_coef}}}"#));
    let batch = sequence(&[1, 0], advantage).with_old_logp(vec![-1.0, -1.0]).unwrap();
    let z: Vec<f32> = [0.5, 0.1, 0.4].into_iter().chain(row).collect();
    let same = |a: f64, b: f64| (a - b).abs() < 1e-6 || a == b || (a.is_nan() && b.is_nan());
    let truth = oracle(&loss, &z, 3, &batch);
    assert!(same(truth.logp[1], logp), "{} for {logp}", truth.logp[1]);
    assert_eq!(truth.loss.is_nan(), logp.is_nan());
    for Found { how, loss: found, scores, dz } in everywhere(&loss, &z, 3, &batch) {
        // A non-finite head makes the logits of every token non-finite: 0 x inf.
        if !how.contains("given logits") {
            continue;
        }
        assert!(same(scores.logp[1].into(), logp), "{how}: {} for {logp}", scores.logp[1]);
        assert!(same(found, truth.loss), "{how}: the loss is {found} for {}", truth.loss);
        assert!(same(scores.entropy[1].into(), truth.entropy[1]), "{how}");
        for (found, truth) in dz.iter().zip(&truth.grad_logits) {
            assert!(same((*found).into(), *truth), "{how}: {dz:?} for {:?}", truth);
        }
        assert_eq!(scores.check_finite(&batch).is_err(), !logp.is_finite(), "{how}");
    }
}

/// One non-finite weight of the head makes the loss NaN; log-probabilities are non-finite at the oracle's tokens.
#[rstest]
fn a_non_finite_head_weight_makes_the_loss_nan(
    #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] poison: f32,
    #[values("grpo", "gspo", "bnpo")] name: &str,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss(name);
    let mut case = Case::new(&loss, &Shape { lengths: &[4, 6], v: 600, layout, ..Shape::default() }, 5);
    let at = if layout == HeadLayout::VocabHidden { 555 * case.h + 2 } else { 2 * case.v + 555 };
    case.lm_head = case.lm_head.with(|lm_head| lm_head[at] = poison);
    let truth = case.oracle(&loss);
    let unseen = |row: &&usize| truth.logp[**row].is_finite();
    // With hidden states of both signs, an infinite weight gives infinities of both signs.
    let expected = if poison.is_nan() { 0..1 } else { 1..case.batch.active_tokens() };
    assert!(expected.contains(&case.batch.active_rows().iter().filter(unseen).count()));
    assert!(truth.loss.is_nan());
    for (how, implementation, tiling) in implementations() {
        let out = run(&mut *plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling)), &case);
        assert!(out.loss.is_nan(), "{how}: {}", out.loss);
        for row in case.batch.active_rows() {
            let (found, truth) = (out.scores.logp[*row], truth.logp[*row]);
            assert_eq!(found.is_finite(), truth.is_finite(), "{how}: token {row}: {found} for {truth}");
        }
        assert!(out.hidden.iter().chain(&out.lm_head).any(|g| g.is_nan()), "{how}");
        assert!(out.scores.check_finite(&case.batch).is_err(), "{how}");
    }
}

/// A result can be checked as a whole: the error names the token, or the loss.
#[test]
fn check_finite_names_the_token_or_the_loss() {
    let (loss, backend) = (config(r#"{"loss_type": "bnpo"}"#), CpuBackend::new());
    let case = Case::new(&loss, &Shape { lengths: &[3, 4], mask_every: 0, ..Shape::default() }, 5);
    let request = case.request(&loss, Implementation::Fused, Tiling::default());
    let gradients = GradientSpec { hidden: false, lm_head: false, bias: false };
    let mut plan = plan(&backend, &PlanRequest { gradients, ..request });
    let mut result = |case: &Case| plan.value_and_grad(case.policy(), &case.batch, GradsMut::default()).unwrap();
    let mut out = result(&case);
    out.check_finite(&case.batch).unwrap();
    out.loss = f64::INFINITY;
    let message = out.check_finite(&case.batch).unwrap_err().to_string();
    assert!(message.contains("loss") && message.contains("inf"), "{message}");
    let message = result(&case.poisoned(4, f32::NAN)).check_finite(&case.batch).unwrap_err().to_string();
    assert!(message.contains("logp at token 4 (sequence 1, position 1): NaN"), "{message}");
    // Scores of another batch are refused.
    let other = case.select(0..1);
    assert!(out.check_finite(&other.batch).is_err());
}
