//! bf16 products of f32 hidden states and heads.

use grpo_backend_cpu::{CpuBackend, Isa};
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::{Tensor, *};
use rstest::rstest;

/// Returns the implementations with bf16 products.
fn rounding() -> impl Iterator<Item = (String, Implementation, Tiling)> {
    implementations().into_iter().filter(|(_, implementation, _)| has_tiled_products(implementation))
}

/// Returns the case with hidden states and head in bf16.
fn narrowed(case: &Case) -> Case {
    let narrow = |tensor: &Tensor| Tensor::new(tensor.to_vec(), Dtype::Bf16);
    Case { hidden: narrow(&case.hidden), lm_head: narrow(&case.lm_head), ..case.clone() }
}

/// Every pair of loss, layout and mask with every instruction set.
#[rstest]
#[case::grpo("grpo", HeadLayout::VocabHidden, false)]
#[case::gspo("gspo", HeadLayout::HiddenVocab, true)]
#[case::softcap("softcap", HeadLayout::VocabHidden, true)]
#[case::softcap_turned("softcap", HeadLayout::HiddenVocab, false)]
fn f32_inputs_give_the_bits_of_rounded_inputs(
    #[case] loss_type: &str,
    #[case] layout: HeadLayout,
    #[case] sampling_mask: bool,
    #[values(Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx)] isa: Isa,
) {
    assert_bits_of_rounded_inputs(loss_type, layout, sampling_mask, isa);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn f32_inputs_give_the_bits_of_rounded_inputs_with_every_loss(
    #[values("grpo", "gspo", "softcap")] loss_type: &str,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values(Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx)] isa: Isa,
    #[values(false, true)] sampling_mask: bool,
) {
    assert_bits_of_rounded_inputs(loss_type, layout, sampling_mask, isa);
}

fn assert_bits_of_rounded_inputs(loss_type: &str, layout: HeadLayout, sampling_mask: bool, isa: Isa) {
    let loss = loss(loss_type);
    let shape = Shape { lengths: &[9, 20, 8], h: 330, v: 1013, layout, bias: false, sampling_mask, ..Shape::default() };
    let case = Case::new(&loss, &shape, 17);
    let (narrow, exact) = (narrowed(&case), case.oracle(&loss));
    assert_flows(&exact);
    let backend = CpuBackend::with_threads(2).unwrap().with_isa(isa);
    for (name, implementation, tiling) in rounding() {
        let request = case.request(&loss, implementation, tiling.clone());
        if !isa.is_available() {
            let refused = backend.clone().with_products(Dtype::Bf16).plan(&request).map(drop);
            assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
            continue;
        }
        let mut ours = plan(&backend.clone().with_products(Dtype::Bf16), &request);
        let got = run(&mut *ours, &case);
        let expected = run(&mut *plan(&backend, &narrow.request(&loss, implementation, tiling)), &narrow);
        assert_eq!((got.loss, &got.scores), (expected.loss, &expected.scores), "{name}");
        assert_eq!(got.hidden, expected.hidden, "{name}");
        // The dtype of the inputs changes the chunks over which the head's gradient is summed.
        let wide: Vec<f64> = expected.lm_head.iter().copied().map(f64::from).collect();
        assert!(difference(&got.lm_head, &wide) < EXACT, "{name}");
        assert_eq!(ours.score(case.policy(), &case.batch).unwrap(), got.scores, "{name}: score and loss disagree");
        // Rounding the operands of a logit's 330 products moves it, but not far.
        let off = got.scores.logp.iter().zip(&exact.logp).map(|(got, exact)| (f64::from(*got) - exact).abs());
        assert!(off.fold(0.0, f64::max) < 0.05, "{name}");
        assert_ne!(got.scores, run(&mut *plan(&backend, &request), &case).scores, "{name}: nothing was rounded");
    }
}

#[test]
fn on_policy_ratios_are_exactly_1() {
    let loss = loss("grpo");
    let case = Case::new(&loss, &Shape::default(), 5);
    for (name, implementation, tiling) in rounding() {
        let backend = CpuBackend::new().with_products(Dtype::Bf16);
        let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
        let scores = plan.score(case.policy(), &case.batch).unwrap();
        let case = case.with_batch(|batch| batch.with_old_logp(scores.logp).unwrap());
        let metrics = run(&mut *plan, &case).metrics;
        for bound in ["is_ratio/min", "is_ratio/max", "is_ratio/mean"] {
            assert_eq!(metrics.value(bound), Some(1.0), "{name}");
        }
    }
}

#[test]
fn contradicting_settings_are_refused_by_name() {
    let loss = loss("grpo");
    let case = Case::new(&loss, &Shape::default(), 5);
    let backend = CpuBackend::new().with_products(Dtype::Bf16);
    let refused = |backend: &CpuBackend, implementation| {
        let request = case.request(&loss, implementation, Tiling::default());
        match backend.plan(&request).map(drop) {
            Err(error @ Error::Unsupported { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let text = refused(&backend, Implementation::Reference);
    assert!(text.contains("`reference` with bf16 products") && text.contains("`fused`"), "{text}");
    let text = refused(&backend.with_dlogits(Dtype::F32), Implementation::Fused);
    assert!(text.contains("f32 dlogits with bf16 products"), "{text}");
}
