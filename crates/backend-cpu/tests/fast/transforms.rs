//! Logit scale, softcap and per-token temperatures, in every implementation.

use backend_cpu::oracle::{Policy, evaluate, score};
use backend_cpu::{CpuBackend, Isa};
use grpo_core::*;
use half::bf16;
use rstest::rstest;
use testkit::cpu::*;
use testkit::*;

#[rstest]
fn implementations_match_the_oracle(
    #[values("softcap", "softcap_logprobs", "logit_scale", "negative_scale")] name: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values(false, true)] temperatures: bool,
) {
    let loss = loss(name);
    let case = Case::new(&loss, &Shape { dtype, layout, temperatures, ..Shape::default() }, 7);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (backend, tolerance) in backends(dtype, 2) {
        for (how, implementation, tiling) in implementations() {
            let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
            let got = run(&mut *plan, &case);
            Differences::new(&got, &expected).assert_within(tolerance, &format!("{name} {dtype:?} {layout:?} {how}"));
            let scores = plan.score(case.policy(), &case.batch).unwrap();
            assert_eq!(scores, got.scores, "{how}: score and loss disagree");
        }
    }
}

#[rstest]
#[case::panels("softcap", &[9, 20, 8], 33, 1013)]
#[case::one_token("softcap", &[1], 600, 63)]
#[case::many_tokens("softcap", &[300, 61], 47, 97)]
#[case::sequence_level("softcap_logprobs", &[9, 20, 8], 33, 1013)]
fn every_instruction_set_matches_the_oracle(
    #[case] name: &str,
    #[case] lengths: &[usize],
    #[case] h: usize,
    #[case] v: usize,
    #[values(Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx)] isa: Isa,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    if !isa.is_available() {
        // parity.rs tests that it is refused.
        return;
    }
    let loss = loss(name);
    let case = Case::new(&loss, &Shape { lengths, h, v, dtype, temperatures: true, ..Shape::default() }, 19);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (backend, tolerance) in backends(dtype, 2) {
        let backend = backend.with_isa(isa);
        for (how, implementation, tiling) in implementations() {
            let got = run(&mut *plan(&backend, &case.request(&loss, implementation, tiling)), &case);
            Differences::new(&got, &expected).assert_within(tolerance, &format!("{name} {isa:?} {how}"));
        }
    }
}

/// Precomputed logits of any size, with their gradient in a separate buffer and in place.
#[rstest]
fn precomputed_logits_match_the_oracle(
    #[values("softcap", "softcap_logprobs", "logit_scale", "negative_scale")] name: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
    #[values((None, None), (Some(4), Some(512)), (Some(1), Some(1)))] (token_chunk, vocab_block): (
        Option<usize>,
        Option<usize>,
    ),
    #[values(3.0, 300.0)] size: f32,
) {
    let loss = LossConfig { beta: 0.0, ..loss(name) };
    let case = Case::new(&loss, &Shape { dtype, temperatures: true, ..Shape::default() }, 3);
    let (n, v) = (case.batch.tokens(), case.v);
    let mut z: Vec<f32> = (0..n * v).map(|i| size * ((i * 29 % 1013) as f32 / 506.0 - 1.0)).collect();
    let mut narrow: Vec<bf16> = z.iter().map(|x| bf16::from_f32(*x)).collect();
    if dtype == Dtype::Bf16 {
        z = narrow.iter().map(|x| x.to_f32()).collect();
    }
    let wide: Vec<f64> = z.iter().copied().map(f64::from).collect();
    let policy = Policy::logits(&wide, v);
    let logp = score(&loss, &policy, &case.batch).unwrap().logp;
    let old = logp.iter().enumerate().map(|(i, l)| *l as f32 + [0.02, -0.1, 0.03][i % 3]).collect();
    let batch = case.batch.clone().with_old_logp(old).unwrap();
    let expected = evaluate(&loss, &policy, &batch).unwrap();
    let request = PlanRequest {
        loss: loss.into(),
        implementation,
        tiling: Tiling { token_chunk, vocab_block, ..Tiling::default() },
        max_tokens: n,
        policy: PolicySpec::Logits { vocab: v, dtype },
        gradients: GradientSpec::default(),
    };
    let mut plan = CpuBackend::with_threads(2).unwrap().plan(&request).unwrap();
    let input = || match dtype {
        Dtype::F32 => PolicyInput::Logits(z.as_slice().into()),
        Dtype::Bf16 => PolicyInput::Logits(narrow.as_slice().into()),
    };
    let mut grad = vec![0.0; n * v];
    let grads = GradsMut { logits: Some(grad.as_mut_slice().into()), ..GradsMut::default() };
    let separate = plan.value_and_grad(input(), &batch, grads).unwrap();
    assert_eq!(plan.score(input(), &batch).unwrap(), separate.scores);
    // This is the f32 precision of logits of 300, and of the distance of a capped logit from its cap.
    let by_size = 2.0 * f64::from(f32::EPSILON * size);
    let off = (separate.loss - expected.loss).abs() / expected.magnitude;
    assert!(off <= 3e-6 + by_size, "loss is off by {off:e}");
    for (got, expected) in [(&separate.scores.logp, &expected.logp), (&separate.scores.entropy, &expected.entropy)] {
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() <= 3e-6 * expected.abs().max(1.0), "{got} for {expected}");
        }
    }
    let largest = expected.grad_logits.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    assert!(largest > 1e-6, "largest gradient is only {largest}");
    let off = difference(&grad, &expected.grad_logits);
    assert!(off <= EXACT + by_size, "gradient is off by {off:e}");

    let place: TensorMut<'_> = match dtype {
        Dtype::F32 => z.as_mut_slice().into(),
        Dtype::Bf16 => narrow.as_mut_slice().into(),
    };
    let in_place = plan.value_and_grad_in_place(place, &batch).unwrap();
    assert_eq!((in_place.loss, in_place.scores), (separate.loss, separate.scores));
    match dtype {
        Dtype::F32 => assert_eq!(z, grad),
        Dtype::Bf16 => assert_eq!(narrow, grad.iter().map(|g| bf16::from_f32(*g)).collect::<Vec<_>>()),
    }
}

const LOGP_OF_SCALED_LOGITS: f64 = -0.348_687_550_358_27;
const SLOPES_OF_SCALED_LOGITS: [f64; 2] = [-0.194_402_215_435_289, 0.294_386_435_463_703];
const LOGP_OF_SCALED_LOGPROBS: f64 = -0.080_234_386_318_826;
const SLOPES_OF_SCALED_LOGPROBS: [f64; 2] = [-0.097_902_652_968_889, 0.148_255_579_111_675];

/// A hand-computed case: z = (1, 0) and the first entry sampled, logit_scale 2, cap 3, T = 2 for the token (5 in the
/// configuration). u = (2, 0), w = (3 tanh(2/3), 0), and w / 2 or log p / 2. Temperature before cap would give 3
/// tanh(1/3).
#[rstest]
#[case::scale_logits("scale_logits", LOGP_OF_SCALED_LOGITS, SLOPES_OF_SCALED_LOGITS)]
#[case::scale_logprobs("scale_logprobs", LOGP_OF_SCALED_LOGPROBS, SLOPES_OF_SCALED_LOGPROBS)]
fn the_order_is_scale_cap_temperature(#[case] mode: &str, #[case] logp: f64, #[case] slopes: [f64; 2]) {
    let loss = config(&format!(
        r#"{{"logit_scale": 2, "final_logit_softcapping": 3, "temperature": 5, "temperature_mode": "{mode}"}}"#
    ));
    let batch = TokenBatch::packed(vec![0], vec![0, 1]).unwrap().with_temperatures(vec![2.0]).unwrap();
    let batch = batch.with_advantages(Advantages::PerSequence(vec![1.0])).unwrap();
    let close = |found: f32, expected: f64| (f64::from(found) - expected).abs() <= 1e-6;
    for implementation in Implementation::ALL {
        let given = takes_logits(&implementation);
        let policy = match given {
            true => PolicySpec::Logits { vocab: 2, dtype: Dtype::F32 },
            false => PolicySpec::Hidden {
                hidden: 1,
                vocab: 2,
                dtype: Dtype::F32,
                layout: HeadLayout::VocabHidden,
                bias: false,
            },
        };
        let (loss, tiling, gradients) = (loss.clone().into(), Tiling::default(), GradientSpec::default());
        let request = PlanRequest { loss, implementation, tiling, max_tokens: 1, policy, gradients };
        let mut plan = CpuBackend::new().plan(&request).unwrap();
        // With a hidden state of 1, the head is the logits, and dhead is dlogits.
        let (z, one, mut grad, mut dhidden) = ([1.0_f32, 0.0], [1.0_f32], [0.0_f32; 2], [0.0_f32]);
        let out = if given {
            let grads = GradsMut { logits: Some((&mut grad[..]).into()), ..GradsMut::default() };
            plan.value_and_grad(PolicyInput::Logits(z[..].into()), &batch, grads)
        } else {
            let policy = PolicyInput::Hidden { hidden: one[..].into(), lm_head: z[..].into(), bias: None };
            let (hidden, lm_head) = (Some((&mut dhidden[..]).into()), Some((&mut grad[..]).into()));
            plan.value_and_grad(policy, &batch, GradsMut { hidden, lm_head, ..GradsMut::default() })
        };
        let found = out.unwrap().scores.logp[0];
        assert!(close(found, logp), "{implementation:?}: log p {found} for {logp}");
        assert!(close(grad[0], slopes[0]) && close(grad[1], slopes[1]), "{implementation:?}: {grad:?} for {slopes:?}");
    }
}
