//! Compares every implementation, loop order, dtype, head layout and loss with the f64 oracle.

use grpo_backend_cpu::oracle::{Policy, evaluate};
use grpo_backend_cpu::{CpuBackend, Isa};
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::{Tensor, *};
use rstest::rstest;

#[rstest]
fn implementations_match_the_oracle(
    #[values(
        "grpo",
        "bnpo",
        "dr_grpo",
        "dapo",
        "cispo",
        "gspo",
        "softcap",
        "softcap_logprobs",
        "logit_scale",
        "negative_scale"
    )]
    loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values(false, true)] bias_and_temperatures: bool,
) {
    let (loss, bias, temperatures) = (loss(loss_type), bias_and_temperatures, bias_and_temperatures);
    let case = Case::new(&loss, &Shape { dtype, layout, bias, temperatures, ..Shape::default() }, 7);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (backend, tolerance) in backends(dtype, 2) {
        for (name, implementation, tiling) in implementations() {
            let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
            let got = run(&mut *plan, &case);
            Differences::new(&got, &expected).assert_within(tolerance, &name);
            for (metric, value) in expected.metrics.values() {
                let off = got.metrics.value(metric).unwrap() - value;
                assert!(off.abs() <= 1e-5, "{name}: metric {metric} is off by {off:e}");
            }
            let scores = plan.score(case.policy(), &case.batch).unwrap();
            assert_eq!(scores, got.scores, "{name}: score and loss disagree");
        }
    }
}

/// Returns the logits of the case, with NaN in masked rows.
fn logits(case: &Case) -> Tensor {
    let mut z = vec![f32::NAN; case.batch.tokens() * case.v];
    for &i in case.batch.active_rows() {
        for j in 0..case.v {
            z[i * case.v + j] = (0..case.h).map(|k| case.hidden[i * case.h + k] * case.lm_head[j * case.h + k]).sum();
        }
    }
    Tensor::new(z, case.dtype())
}

#[rstest]
fn precomputed_logits_match_the_oracle(
    #[values("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
    #[values((None, None), (Some(4), Some(512)), (Some(1), Some(1)))] (token_chunk, vocab_block): (
        Option<usize>,
        Option<usize>,
    ),
) {
    let (loss, backend) = (loss(loss_type), CpuBackend::with_threads(2).unwrap());
    let case = Case::new(&loss, &Shape { dtype, ..Shape::default() }, 3);
    let (z, size) = (logits(&case), [case.batch.tokens(), case.v]);
    let expected = evaluate(&loss, &Policy::logits(&z.in_f64(), case.v), &case.batch).unwrap();
    let largest = expected.grad_logits.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    assert!(largest > 1e-3, "largest gradient is only {largest}");
    let tiling = Tiling { token_chunk, vocab_block, ..Tiling::default() };
    let mut plan = plan(&backend, &logits_request(&loss, implementation, tiling, size, dtype));
    let (got, gradient) = run_logits(&mut *plan, &z, &case.batch);
    let off = (got.loss / expected.loss - 1.0).abs();
    assert!(off <= 2e-6, "loss is off by {off:e}");
    let off = difference(&gradient, &expected.grad_logits);
    assert!(off <= EXACT, "gradient is off by {off:e}");
}

#[rstest]
#[case::one_entry(&[3, 1], 8, 1)]
#[case::two_entries(&[3, 1], 8, 2)]
#[case::odd_vocabulary(&[5, 6], 33, 1013)]
#[case::one_token(&[1], 40, 700)]
#[case::one_token_one_tile(&[1], 40, 60)]
#[case::one_token_sequences(&[1, 1, 1, 1, 1, 1, 1], 16, 130)]
#[case::empty_sequences(&[0, 4, 0, 0, 3, 0], 16, 130)]
#[case::tile_of_one(&[4, 3], 20, 513)]
#[case::narrow_hidden(&[4, 3], 1, 600)]
#[case::narrow_hidden_two(&[4, 3], 2, 600)]
#[case::long_hidden(&[4, 3], 1100, 90)]
fn odd_shapes_match_the_oracle(
    #[case] lengths: &[usize],
    #[case] h: usize,
    #[case] v: usize,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    // Each pair of a loss, a dtype and a layout occurs with every shape.
    let loss_type = if (dtype == Dtype::F32) == (layout == HeadLayout::VocabHidden) { "dapo" } else { "gspo" };
    let loss = loss(loss_type);
    for (backend, tolerance) in backends(dtype, 3) {
        let case = Case::new(&loss, &Shape { lengths, h, v, dtype, layout, mask_every: 0, ..Shape::default() }, 11);
        let expected = case.oracle(&loss);
        for (name, implementation, tiling) in implementations() {
            let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
            let got = run(&mut *plan, &case);
            if v == 1 {
                // log p = 0, so the gradient is exactly 0.
                assert!(got.scores.logp.iter().chain(&got.hidden).chain(&got.lm_head).all(|x| *x == 0.0), "{name}");
                assert!((got.loss - expected.loss).abs() < 1e-6);
            } else {
                Differences::new(&got, &expected).assert_within(tolerance, &format!("{loss_type}: {name}"));
            }
        }
    }
}

/// Forces every code path of this machine, with sizes that are not multiples of panels, pieces or tiles: all of them
/// with a per-token loss, one with the entropy's gradient, one with a ratio per sequence, clipped on either side, and some
/// with a softcap and temperatures per token.
#[rstest]
#[case::panels("dapo", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, ..Shape::default() })]
#[case::one_token("dapo", Shape { lengths: &[1], h: 600, v: 63, ..Shape::default() })]
#[ignore = "GRPO_TESTS=all"]
#[case::many_tokens("dapo", Shape { lengths: &[300, 261], h: 47, v: 97, ..Shape::default() })]
#[ignore = "GRPO_TESTS=all"]
#[case::entropy("cispo", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, ..Shape::default() })]
#[case::sequence_level("gspo", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, lean: 0.2, ..Shape::default() })]
#[case::softcap("softcap", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, temperatures: true, ..Shape::default() })]
#[ignore = "GRPO_TESTS=all"]
#[case::softcap_many("softcap", Shape { lengths: &[300, 61], h: 47, v: 97, temperatures: true, ..Shape::default() })]
#[ignore = "GRPO_TESTS=all"]
#[case::softcap_sequences("softcap_logprobs", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, temperatures: true, ..Shape::default() })]
fn every_instruction_set_matches_the_oracle(
    #[case] loss_type: &str,
    #[case] shape: Shape<'_>,
    #[values(Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx)] isa: Isa,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    // Each pair of an instruction set, a dtype and a layout occurs.
    let is_even = matches!(isa, Isa::Portable | Isa::Avx512 | Isa::Amx);
    let layout = if is_even == (dtype == Dtype::F32) { HeadLayout::VocabHidden } else { HeadLayout::HiddenVocab };
    let loss = loss(loss_type);
    let case = Case::new(&loss, &Shape { dtype, layout, ..shape }, 17);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (backend, tolerance) in backends(dtype, 2) {
        let backend = backend.with_isa(isa);
        for (name, implementation, tiling) in implementations() {
            let request = case.request(&loss, implementation, tiling);
            if !isa.is_available() {
                let refused = backend.plan(&request).map(drop);
                assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
                continue;
            }
            let got = run(&mut *plan(&backend, &request), &case);
            Differences::new(&got, &expected).assert_within(tolerance, &format!("{isa:?} {name}"));
        }
    }
}

/// The first sequence is masked; `traps/denominators.rs` has batches without active tokens.
#[rstest]
fn a_masked_sequence_matches_the_oracle(#[values("grpo", "dapo", "gspo")] loss_type: &str) {
    let (loss, backend) = (loss(loss_type), CpuBackend::with_threads(2).unwrap());
    let case = Case::new(&loss, &Shape { lengths: &[4, 5], ..Shape::default() }, 5);
    let mask: Vec<f32> = (0..9).map(|i| if i >= 4 && case.batch.is_active(i) { 1.0 } else { 0.0 }).collect();
    let case = case.with_batch(|batch| batch.with_mask(&mask).unwrap());
    let expected = case.oracle(&loss);
    for (name, implementation, tiling) in implementations() {
        let got = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling)), &case);
        Differences::new(&got, &expected).assert_small(&name);
        assert!(got.hidden[..4 * case.h].iter().all(|g| *g == 0.0), "{name}");
    }
}

/// Leaving out one gradient does not change the others.
#[rstest]
fn omitted_gradients_do_not_change_others(#[values(true, false)] hidden: bool, #[values(true, false)] lm_head: bool) {
    let (loss, backend) = (loss("grpo"), CpuBackend::with_threads(2).unwrap());
    let case = Case::new(&loss, &Shape::default(), 17);
    for (name, implementation, tiling) in implementations() {
        let all = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling.clone())), &case);
        let mut request = case.request(&loss, implementation, tiling);
        request.gradients = GradientSpec { hidden, lm_head, bias: false };
        let (mut dh, mut dw) = (vec![0.0; all.hidden.len()], vec![0.0; all.lm_head.len()]);
        let grads = GradsMut {
            hidden: hidden.then_some(dh.as_mut_slice().into()),
            lm_head: lm_head.then_some(dw.as_mut_slice().into()),
            ..GradsMut::default()
        };
        let out = plan(&backend, &request).value_and_grad(case.policy(), &case.batch, grads).unwrap();
        assert_eq!(out.loss, all.loss, "{name}");
        assert!(!hidden || dh == all.hidden, "{name}");
        assert!(!lm_head || dw == all.lm_head, "{name}");
    }
}

#[test]
fn invalid_requests_are_refused_with_a_reason() {
    let (loss, backend) = (loss("grpo"), CpuBackend::new());
    let case = Case::new(&loss, &Shape::default(), 1);
    let mut request = case.request(&loss, Implementation::Fused, Tiling::default());
    request.policy = PolicySpec::Logits { vocab: 10, dtype: Dtype::F32 };
    assert!(matches!(backend.plan(&request), Err(Error::Unsupported { .. })));
    let tiling = Tiling { workspace_budget: 1000, ..Tiling::default() };
    let request = case.request(&loss, Implementation::Fused, tiling);
    assert!(matches!(backend.plan(&request), Err(Error::Budget { budget: 1000, .. })));

    #[derive(Debug)]
    struct Elsewhere;
    impl DeviceTensor for Elsewhere {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
        fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
            self
        }
    }
    let mut plan = plan(&backend, &case.request(&loss, Implementation::Fused, Tiling::default()));
    let policy = PolicyInput::Hidden {
        hidden: TensorRef::Device(&Elsewhere),
        lm_head: case.lm_head.as_ref(),
        bias: case.bias.as_ref().map(|bias| bias.as_ref()),
    };
    assert!(matches!(plan.score(policy, &case.batch), Err(Error::Unsupported { .. })));
}

/// Logits from -1e4 to 1e4, some of them -inf, but not the target's; a policy so confident that 1 - p rounds to 0 in
/// f32.
#[rstest]
fn extreme_logits_match_the_oracle(
    #[values("grpo", "cispo", "gspo")] loss_type: &str,
    #[values(30.0, 1e2, 1e4)] scale: f32,
) {
    let (loss, backend) = (loss(loss_type), CpuBackend::with_threads(2).unwrap());
    let case = Case::new(&loss, &Shape { v: 700, ..Shape::default() }, 67);
    let (n, v) = (case.batch.tokens(), case.v);
    let target = |i: usize| case.batch.targets()[i];
    let mut z: Vec<f32> = (0..n * v).map(|i| scale * ((i * 29 % 1013) as f32 / 506.0 - 1.0)).collect();
    for i in case.batch.active_rows() {
        let row = &mut z[i * v..(i + 1) * v];
        row.iter_mut().step_by(7).for_each(|z| *z = f32::NEG_INFINITY);
        row[target(*i) as usize] = if i % 3 == 0 { 1.5 * scale } else { -0.9 * scale };
    }
    let wide: Vec<f64> = z.iter().copied().map(f64::from).collect();
    let policy = Policy::logits(&wide, v);
    let logp = grpo_backend_cpu::oracle::score(&loss, &policy, &case.batch).unwrap().logp;
    let old = logp.iter().enumerate().map(|(i, l)| *l as f32 + [0.02, -0.1, 0.03][i % 3]).collect();
    let batch = case.batch.clone().with_old_logp(old).unwrap().with_ref_logp(vec![-1.0; n]).unwrap();
    // The KL to such a distant reference is e^1e4, which is not tested here.
    let loss = LossConfig { beta: 0.0, ..loss };
    let expected = evaluate(&loss, &policy, &batch).unwrap();
    for implementation in Implementation::ALL.into_iter().filter(takes_logits) {
        let request = logits_request(&loss, implementation, Tiling::default(), [n, v], Dtype::F32);
        let mut z = z.clone();
        let got = plan(&backend, &request).value_and_grad_in_place(z.as_mut_slice().into(), &batch).unwrap();
        assert!(got.loss.is_finite(), "{implementation:?}");
        for (name, got, expected) in
            [("logp", &got.scores.logp, &expected.logp), ("entropy", &got.scores.entropy, &expected.entropy)]
        {
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                // Relative error: if the target is certain, a log-probability of -1e-13 keeps its precision. If another
                // entry is certain, the f32 sum of a tile bounds the entropy's precision.
                let floor = if name == "entropy" && i % 3 != 0 { 1e-7 } else { 1e-30 };
                let off = (f64::from(*got) - expected).abs();
                assert!(off <= 3e-6 * expected.abs() + floor, "{implementation:?}: {name} {got} for {expected}");
            }
        }
        // Row by row: the most certain rows have the smallest gradients.
        for i in batch.active_rows().iter().map(|i| i * v..(i + 1) * v) {
            let off = difference(&z[i.clone()], &expected.grad_logits[i.clone()]);
            let sum: f64 = z[i.clone()].iter().map(|g| f64::from(*g)).sum();
            let largest = expected.grad_logits[i].iter().fold(0.0_f64, |m, g| m.max(g.abs()));
            // A log-probability of -2e4 in f32 has an error of 1e-3, and so has the ratio; below the range of f32, all is 0.
            let tolerance = 2e-5 + 2.0 * f64::from(f32::EPSILON * scale);
            assert!(off * largest <= tolerance * largest + 1e-37, "{implementation:?}: gradient is off by {off:e}");
            assert!(sum.abs() <= 1e-5 * largest + 1e-37, "{implementation:?}: gradient sums to {sum:e} of {largest:e}");
        }
    }
}
