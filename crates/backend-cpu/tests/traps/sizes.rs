//! Sizes that 32 bits, or no machine, can hold.

use super::*;
use common::config;
use rstest::rstest;

fn request(implementation: Implementation, max_tokens: usize, policy: PolicySpec) -> PlanRequest {
    PlanRequest {
        loss: config("{}"),
        implementation,
        tiling: Tiling::default(),
        max_tokens,
        policy,
        gradients: GradientSpec::default(),
    }
}

fn hidden(hidden: usize, vocab: usize) -> PolicySpec {
    PolicySpec::Hidden { hidden, vocab, dtype: Dtype::F32, layout: HeadLayout::VocabHidden, bias: false }
}

/// 2^16 + 1 tokens of a vocabulary of 2^16: one row more than 32 bits count. Plans, which allocate far less, know.
#[test]
fn n_times_v_beyond_32_bits_is_counted() {
    let (n, v) = ((1_usize << 16) + 1, 1_usize << 16);
    let naive = (n as u32).wrapping_mul(v as u32) as usize;
    assert_eq!(naive, v, "in 32 bits there is one row");
    let memory = |request: &PlanRequest| CpuBackend::with_threads(2).unwrap().plan(request).unwrap().memory();

    let logits = PolicySpec::Logits { vocab: v, dtype: Dtype::F32 };
    for implementation in [Implementation::Reference, Implementation::Logits] {
        let report = memory(&request(implementation, n, logits));
        assert_eq!((report.inputs, report.outputs), (4 * n * v, 4 * n * v + 8 * n), "{implementation:?}");
    }
    let report = memory(&request(Implementation::Reference, n, hidden(4, v)));
    assert!(report.workspace > 4 * n * v);
    let report = memory(&request(Implementation::Fused, n, hidden(4, v)));
    assert_eq!(report.inputs, 4 * (n * 4 + v * 4));
    assert!(report.workspace <= Tiling::default().workspace_budget);
}

/// Sizes whose bytes do not fit usize are refused before anything is multiplied out.
#[rstest]
#[case::given_logits(Implementation::Logits, 1 << 33, PolicySpec::Logits { vocab: 1 << 33, dtype: Dtype::F32 })]
#[case::in_bytes(Implementation::Logits, 1 << 31, PolicySpec::Logits { vocab: 1 << 31, dtype: Dtype::F32 })]
#[case::hidden_states(Implementation::Fused, 1 << 33, hidden(1 << 33, 8))]
#[case::head(Implementation::Fused, 8, hidden(1 << 33, 1 << 33))]
#[case::dense(Implementation::Reference, 1 << 33, hidden(1, 1 << 33))]
#[case::materialised(Implementation::Logits, 1 << 33, hidden(1, 1 << 33))]
fn overflowing_sizes_are_refused(
    #[case] implementation: Implementation,
    #[case] max_tokens: usize,
    #[case] policy: PolicySpec,
) {
    let error = CpuBackend::with_threads(1).unwrap().plan(&request(implementation, max_tokens, policy)).err().unwrap();
    assert!(matches!(&error, Error::Shape { what, .. } if what == "tensor size"), "{error}");
    assert!(error.to_string().contains(" x "), "{error}");
}

/// More logits than 32 bits count, 2^31 + 2^16 of them, are computed: 2^15 + 1 equal sequences of one token each have the loss and the
/// gradients of one of them.
#[test]
fn more_than_2_to_31_logits_are_computed() {
    let (n, v, h) = ((1_usize << 15) + 1, 1_usize << 16, 2);
    assert!(n * v > 1 << 31);
    let run = |n: usize| {
        let (hidden, head): (Vec<f32>, Vec<f32>) =
            ([0.75, -1.25].repeat(n), (0..v * h).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect());
        let batch = TokenBatch::packed(vec![40_000; n], (0..=n).collect()).unwrap();
        let batch = batch.with_advantages(Advantages::PerSequence(vec![1.5; n])).unwrap();
        let (mut of_hidden, mut of_head) = (vec![0.0; n * h], vec![0.0; v * h]);
        let request = request(Implementation::Fused, n, self::hidden(h, v));
        let grads = GradsMut {
            hidden: Some(of_hidden.as_mut_slice().into()),
            lm_head: Some(of_head.as_mut_slice().into()),
            ..GradsMut::default()
        };
        let policy = PolicyInput::Hidden { hidden: (&hidden[..]).into(), lm_head: (&head[..]).into(), bias: None };
        let backend = CpuBackend::with_threads(2).unwrap();
        let out = backend.plan(&request).unwrap().value_and_grad(policy, &batch, grads).unwrap();
        (out.loss, out.scores.logp, of_hidden, of_head)
    };
    let (one, all) = (run(1), run(n));
    let close = |a: f32, b: f32, scale: f32| assert!((a - b).abs() <= 1e-5 * scale, "{a} and {b}");
    assert!((one.0 - all.0).abs() < 1e-6 * one.0.abs(), "{} and {}", one.0, all.0);
    assert!(all.1.iter().all(|logp| *logp == one.1[0]), "every token has the same bits");
    for token in all.2.chunks(h) {
        (0..h).for_each(|i| close(token[i] * n as f32, one.2[i], 1.0));
    }
    all.3.iter().zip(&one.3).for_each(|(a, b)| close(*a, *b, 1.5));
}
