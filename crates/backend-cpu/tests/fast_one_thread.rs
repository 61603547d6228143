//! Without the feature `rayon`, kernels run on the caller's thread.
#![cfg(not(feature = "rayon"))]

use backend_cpu::CpuBackend;
use backend_cpu::oracle::{Policy, evaluate};
use grpo_core::*;
use rstest::rstest;
use testkit::cpu::*;
use testkit::*;

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
    let z: Vec<f32> = (0..n * v)
        .map(|i| if case.batch.is_active(i / v) { ((i * 37 % 101) as f32 / 50.0 - 1.0) * 3.0 } else { f32::NAN })
        .collect();
    let wide: Vec<f64> = z.iter().copied().map(f64::from).collect();
    let expected = evaluate(&loss, &Policy::logits(&wide, v), &case.batch).unwrap();
    let mut first = None;
    for (token_chunk, vocab_block) in [(None, None), (Some(4), Some(512)), (Some(1), Some(1))] {
        let request = PlanRequest {
            loss: loss.clone().into(),
            implementation: Implementation::Logits,
            tiling: Tiling { token_chunk, vocab_block, ..Tiling::default() },
            max_tokens: n,
            policy: PolicySpec::Logits { vocab: v, dtype: Dtype::F32 },
            gradients: GradientSpec::default(),
        };
        let mut plan = plan(&CpuBackend::with_threads(1).unwrap(), &request);
        let what = format!("{loss_type}, chunks of {token_chunk:?}, blocks of {vocab_block:?}");
        let mut grad = vec![0.0; n * v];
        let grads = GradsMut { logits: Some(grad.as_mut_slice().into()), ..GradsMut::default() };
        let separate = plan.value_and_grad(PolicyInput::Logits(z.as_slice().into()), &case.batch, grads).unwrap();
        let off = difference(&grad, &expected.grad_logits);
        assert!(off <= EXACT, "{what}: gradient is off by {off:e}");
        let mut in_place = z.clone();
        let out = plan.value_and_grad_in_place(in_place.as_mut_slice().into(), &case.batch).unwrap();
        assert_eq!((out.loss.to_bits(), &out.scores), (separate.loss.to_bits(), &separate.scores), "{what}");
        assert_eq!(in_place, grad, "{what}");
        let (scores, gradient) = first.get_or_insert_with(|| (separate.scores.clone(), grad.clone()));
        assert_eq!((&separate.scores, &grad), (&*scores, &*gradient), "{what}");
    }
}
