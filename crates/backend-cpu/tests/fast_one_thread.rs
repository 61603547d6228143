//! Without the feature `rayon`, kernels run on the caller's thread.
#![cfg(not(feature = "rayon"))]

use grpo_backend_cpu::CpuBackend;
use grpo_backend_cpu::oracle::{Policy, evaluate};
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::{Tensor, *};
use rstest::rstest;

#[test]
fn more_threads_than_one_are_refused() {
    for threads in [2, 5] {
        let error = CpuBackend::with_threads(threads).expect_err("there is one thread");
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains("feature `rayon`") && message.contains(&format!("{threads} threads")), "{message}");
    }
    for threads in [0, 1] {
        CpuBackend::with_threads(threads).expect("the caller's thread");
    }
}

/// Every way to select one thread gives the oracle's results, bit-identical to one another.
#[rstest]
fn implementations_match_the_oracle_on_the_callers_thread(
    #[values("grpo", "gspo")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &Shape { dtype, ..Shape::default() }, 7);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let [by_default, one] = [CpuBackend::new(), CpuBackend::with_threads(1).unwrap()]
            .map(|backend| run(&mut *plan(&backend.with_dlogits(Dtype::F32), &request), &case));
        Differences::new(&by_default, &expected).assert_small(&format!("{loss_type} {dtype:?}: {name}"));
        assert_eq!(by_default.loss.to_bits(), one.loss.to_bits(), "{name}");
        assert_eq!(by_default.scores, one.scores, "{name}");
        assert_eq!((&by_default.hidden, &by_default.lm_head), (&one.hidden, &one.lm_head), "{name}");
        assert_eq!(by_default.bias, one.bias, "{name}");
    }
}

/// Precomputed logits, whose tasks run in order: log-probabilities and gradients are bit-identical for any blocking,
/// and match the oracle.
#[rstest]
fn precomputed_logits_match_the_oracle_on_the_callers_thread(#[values("grpo", "gspo")] loss_type: &str) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &Shape::default(), 3);
    let (n, v) = (case.batch.tokens(), case.v);
    let of = |i: usize| if case.batch.is_active(i / v) { ((i * 37 % 101) as f32 / 50.0 - 1.0) * 3.0 } else { f32::NAN };
    let z = Tensor::new((0..n * v).map(of).collect(), Dtype::F32);
    let expected = evaluate(&loss, &Policy::logits(&z.in_f64(), v), &case.batch).unwrap();
    let mut first = None;
    for (token_chunk, vocab_block) in [(None, None), (Some(4), Some(512)), (Some(1), Some(1))] {
        let tiling = Tiling { token_chunk, vocab_block, ..Tiling::default() };
        let request = logits_request(&loss, Implementation::Logits, tiling, [n, v], Dtype::F32);
        let mut plan = plan(&CpuBackend::with_threads(1).unwrap(), &request);
        let (out, gradient) = run_logits(&mut *plan, &z, &case.batch);
        let what = format!("{loss_type}, chunks of {token_chunk:?}, blocks of {vocab_block:?}");
        let off = difference(&gradient, &expected.grad_logits);
        assert!(off <= EXACT, "{what}: gradient is off by {off:e}");
        let (scores, first) = first.get_or_insert_with(|| (out.scores.clone(), gradient.clone()));
        assert_eq!((&out.scores, &gradient), (&*scores, &*first), "{what}");
    }
}
