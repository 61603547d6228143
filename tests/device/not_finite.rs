//! NaN and infinity at active tokens reach the results of every program. The CPU's tests and the golden files cover all
//! losses.

use crate::evaluation::Output;
use crate::{SMALL, backend, chunks, grpo, gspo, implementations, on_mesh, softcap};
use grpo_core::{
    Error, GradsMut, Implementation, LossConfig, LossPlan, PlanRequest, PolicyInput, PolicySpec, Tiling, TokenBatch,
};
use grpo_testkit::{Case, Shape, config};
use rstest::rstest;

/// On one device and on a mesh, on which the maxima and sums of rows are reduced.
#[rstest]
#[case(gspo(), (2, 2))]
#[case(softcap(), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case(gspo(), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case(softcap(), (2, 2))]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), (2, 2))]
fn nan_in_hidden_states_reaches_the_loss(#[case] loss: LossConfig, #[case] (data, vocab): (usize, usize)) {
    let case = Case::new(&loss, &Shape { bias: true, ..SMALL }, 13);
    let begin = Output::begin(&case.oracle(&loss), case.request(&loss, Implementation::Fused, chunks(5)).gradients);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        // A softcap maps an infinite logit to a finite one.
        let infinity = if loss.final_logit_softcapping.is_some() { f32::NAN } else { f32::INFINITY };
        for (row, poison) in [(0, f32::NAN), (8, f32::NAN), (8, infinity), (3, -infinity)] {
            let case = case.poisoned(row, poison);
            let what = format!("{name} on {data} x {vocab}, {poison} at {row}");
            let mut output = begin.clone();
            output.add(&mut plan, &case);
            assert!(output.loss.is_nan(), "{what}: {}", output.loss);
            for other in case.batch.active_rows() {
                let logp = output.scores.logp[*other];
                assert_eq!(logp.is_nan(), *other == row, "{what}: {logp} of token {other}");
            }
            let h = case.h;
            let (hidden, lm_head) = (output.hidden.unwrap(), output.lm_head.unwrap());
            assert!(hidden[row * h..(row + 1) * h].iter().all(|g| g.is_nan()), "{what}");
            assert!(lm_head.iter().any(|g| g.is_nan()), "{what}");
            for masked in (0..case.tokens()).filter(|i| !case.batch.is_active(*i)) {
                let row = masked * h..(masked + 1) * h;
                assert_eq!(hidden[row.clone()], begin.hidden.as_ref().unwrap()[row], "{what}: masked token {masked}");
            }
            let message = output.scores.check_finite(&case.batch).unwrap_err().to_string();
            assert!(message.contains(&format!("token {row} (")), "{what}: {message}");
        }
    }
}

/// Rows of precomputed logits, compared with PyTorch's log_softmax.
#[rstest]
fn non_finite_logits_match_log_softmax(
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
) {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let loss = config(r#"{"loss_type": "bnpo", "entropy_coef": 0.1}"#);
    let batch = TokenBatch::packed(vec![1, 0], vec![0, 2]).unwrap();
    let batch = batch.with_advantages(vec![0.0]).unwrap().with_old_logp(vec![-1.0; 2]).unwrap();
    let case = Case::new(&loss, &Shape { lengths: &[2], v: 3, ..SMALL }, 3);
    let request = PlanRequest {
        policy: PolicySpec::Logits { vocab: 3, dtype: grpo_core::Dtype::F32 },
        ..case.request(&loss, implementation, Tiling::default())
    };
    let mut plan = backend().plan_on_device(&request).unwrap();
    for (row, logp) in [
        ([0.3, nan, 0.9], nan),
        ([nan, 0.1, 0.9], nan),
        ([0.3, inf, 0.9], nan),
        ([inf, 0.1, 0.9], nan),
        ([inf; 3], nan),
        ([-inf; 3], nan),
        ([-inf, 0.1, 0.9], -inf),
        ([0.3, -inf, 0.3], -std::f32::consts::LN_2),
    ] {
        let z: Vec<f32> = [0.5, 0.1, 0.4].into_iter().chain(row).collect();
        let mut dz = vec![0.0; 6];
        let grads = GradsMut { logits: Some((&mut dz).into()), ..GradsMut::default() };
        let out = plan.value_and_grad(PolicyInput::Logits(z.as_slice().into()), &batch, grads).unwrap();
        let found = out.scores.logp[1];
        assert!((found - logp).abs() < 1e-6 || found == logp || (found.is_nan() && logp.is_nan()), "{row:?}: {found}");
        assert_eq!((out.loss.is_nan(), dz[3..].iter().all(|g| g.is_nan())), (logp.is_nan(), logp.is_nan()), "{row:?}");
        assert_eq!(out.check_finite(&batch).is_err(), !logp.is_finite(), "{row:?}");
    }
}

/// Plans that exceed the memory of any device are refused before compilation.
#[test]
fn memory_limit_is_checked_before_and_after_compiling() {
    let case = Case::new(&grpo(), &SMALL, 5);
    let with = |memory_limit| {
        let tiling = Tiling { memory_limit, ..Tiling::default() };
        backend().plan_on_device(&case.request(&grpo(), Implementation::Reference, tiling))
    };
    let memory = with(None).unwrap().memory();
    assert!(with(Some(memory.total())).is_ok());
    for limit in [0, memory.total() - 1] {
        assert!(matches!(with(Some(limit)), Err(Error::Memory { limit: found, .. }) if found == limit));
    }
}
