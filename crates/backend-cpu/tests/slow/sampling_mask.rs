//! Tokens that were sampled from a part of the vocabulary: log-probabilities, entropies and gradients are over its ids.

use grpo_backend_cpu::CpuBackend;
use grpo_backend_cpu::oracle::{Policy, evaluate};
use grpo_core::batch::SamplingMask;
use grpo_core::*;
use grpo_testkit::cpu::*;
use grpo_testkit::{Tensor, *};
use rstest::rstest;

#[rstest]
fn masked_softmaxes_match_the_oracle(
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
) {
    let loss = loss(loss_type);
    let shape = Shape { dtype, layout, sampling_mask: true, temperatures: true, ..Shape::default() };
    let case = Case::new(&loss, &shape, 7);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    let whole = case.arranged(&[0, 1, 2, 3, 4], None).with_batch(without_mask);
    assert!((whole.oracle(&loss).loss - expected.loss).abs() > 1e-3);
    for (backend, tolerance) in backends(dtype, 2) {
        for (name, implementation, tiling) in implementations() {
            let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
            let got = run(&mut *plan, &case);
            Differences::new(&got, &expected).assert_within(tolerance, &name);
            let scores = plan.score(case.policy(), &case.batch).unwrap();
            assert_eq!(scores, got.scores, "{name}: score and loss disagree");
        }
    }
}

/// Every pair of dtype, layout and bias.
#[rstest]
#[case::grpo("grpo", Dtype::F32, HeadLayout::VocabHidden, true)]
#[case::gspo("gspo", Dtype::F32, HeadLayout::HiddenVocab, false)]
#[case::softcap_logprobs("softcap_logprobs", Dtype::Bf16, HeadLayout::VocabHidden, false)]
#[case::negative_scale("negative_scale", Dtype::Bf16, HeadLayout::HiddenVocab, true)]
fn short_lists_of_a_large_vocabulary_match_the_oracle(
    #[case] loss_type: &str,
    #[case] dtype: Dtype,
    #[case] layout: HeadLayout,
    #[case] bias: bool,
) {
    assert_short_lists(loss_type, dtype, layout, bias);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn short_lists_match_the_oracle_in_every_dtype_and_layout(
    #[values("grpo", "gspo", "softcap_logprobs", "negative_scale")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values(true, false)] bias: bool,
) {
    assert_short_lists(loss_type, dtype, layout, bias);
}

/// A vocabulary so large that both layouts of the head are gathered for lists of some ids.
fn assert_short_lists(loss_type: &str, dtype: Dtype, layout: HeadLayout, bias: bool) {
    let loss = loss(loss_type);
    let shape =
        Shape { dtype, layout, bias, h: 70, v: 12_000, sampling_mask: true, temperatures: true, ..Shape::default() };
    let case = Case::new(&loss, &shape, 11);
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (backend, tolerance) in backends(dtype, 3) {
        let mut scores: Option<Scores> = None;
        for (name, implementation, tiling) in implementations() {
            let mut plan = plan(&backend, &case.request(&loss, implementation, tiling));
            let got = run(&mut *plan, &case);
            Differences::new(&got, &expected).assert_within(tolerance, &name);
            assert_eq!(plan.score(case.policy(), &case.batch).unwrap(), got.scores, "{name}");
            if has_tiled_products(&implementation) {
                assert_eq!(*scores.get_or_insert_with(|| got.scores.clone()), got.scores, "{name}");
            }
        }
    }
}

/// Returns a case whose tokens were all sampled from a few ids, and the ids that no token was sampled from.
fn gathered(loss: &LossConfig, shape: &Shape<'_>) -> (Case, Vec<usize>) {
    let case = Case::new(loss, &Shape { sampling_mask: true, ..*shape }, 13);
    let (mut mask, mut others) = (SamplingMask::default(), vec![true; case.v]);
    for row in 0..case.tokens() {
        let of_case = case.batch.kept(row).filter(|ids| ids.len() < 30).unwrap_or_default();
        let target = case.batch.targets()[row].clamp(0, case.v as i64 - 1) as u32;
        let ids = if of_case.is_empty() { vec![target, (target + 5) % case.v as u32] } else { of_case.to_vec() };
        mask.push(&ids);
        ids.iter().filter(|id| (**id as usize) < case.v).for_each(|id| others[*id as usize] = false);
    }
    let case = case.with_batch(|batch| batch.with_sampling_mask(mask).unwrap());
    let others = (0..case.v).filter(|id| others[*id]).collect();
    (case, others)
}

#[rstest]
fn the_head_of_other_ids_than_the_kept_ones_is_not_read(
    #[values("grpo", "gspo", "softcap")] loss_type: &str,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss(loss_type);
    let (case, others) = gathered(&loss, &Shape { layout, v: 12_000, ..Shape::default() });
    assert!(others.len() > 11_000);
    let place = |id: usize, unit: usize| match layout {
        HeadLayout::VocabHidden => id * case.h + unit,
        HeadLayout::HiddenVocab => unit * case.v + id,
    };
    let poisoned = Case {
        lm_head: case.lm_head.with(|head| {
            others.iter().for_each(|id| (0..case.h).for_each(|unit| head[place(*id, unit)] = f32::NAN));
        }),
        ..case.clone()
    };
    let expected = case.oracle(&loss);
    assert_flows(&expected);
    for (name, implementation, tiling) in implementations() {
        if !has_tiled_products(&implementation) {
            continue;
        }
        let mut plan = plan(&CpuBackend::with_threads(2).unwrap(), &case.request(&loss, implementation, tiling));
        let got = run(&mut *plan, &poisoned);
        Differences::new(&got, &expected).assert_within(EXACT, &name);
        assert!(others.iter().all(|id| (0..case.h).all(|unit| got.lm_head[place(*id, unit)] == 0.0)), "{name}");
    }
}

/// All kept logits of a token are equal: each has the same probability.
#[test]
fn ties_share_the_probability() {
    let loss = loss("grpo");
    let (case, _) = gathered(&loss, &Shape { bias: false, v: 12_000, ..Shape::default() });
    let case = Case { lm_head: case.lm_head.with(|head| head.fill(0.25)), ..case };
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling));
        let scores = plan.score(case.policy(), &case.batch).unwrap();
        for row in case.batch.active_rows() {
            let expected = (case.batch.kept(*row).unwrap().len() as f32).ln();
            for found in [-scores.logp[*row], scores.entropy[*row]] {
                assert!((found - expected).abs() <= 1e-6 * expected, "{name}: {found} for ln {expected}");
            }
        }
    }
}

/// Returns the batch with the whole vocabulary at every token.
fn without_mask(batch: TokenBatch) -> TokenBatch {
    let mut mask = SamplingMask::default();
    mask.resize(batch.tokens());
    batch.with_sampling_mask(mask).unwrap()
}

#[rstest]
fn on_policy_ratios_are_exactly_1(
    #[values("grpo", "gspo", "softcap", "negative_scale")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let loss = loss(loss_type);
    let shape = Shape { dtype, sampling_mask: true, temperatures: true, ..Shape::default() };
    let case = Case::new(&loss, &shape, 5);
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling));
        let scores = plan.score(case.policy(), &case.batch).unwrap();
        // A token whose target was the only id has a probability of 1.
        let alone =
            case.batch.active_rows().iter().filter(|row| case.batch.kept(**row).is_some_and(|ids| ids.len() == 1));
        alone.for_each(|row| assert_eq!((scores.logp[*row], scores.entropy[*row]), (0.0, 0.0), "{name}"));
        let case = case.with_batch(|batch| batch.with_old_logp(scores.logp).unwrap());
        let metrics = run(&mut *plan, &case).metrics;
        for bound in ["is_ratio/min", "is_ratio/max", "is_ratio/mean"] {
            assert_eq!(metrics.value(bound), Some(1.0), "{name}");
        }
    }
}

#[rstest]
fn a_mask_of_all_ids_changes_no_bit(#[values("grpo", "softcap", "negative_scale")] loss_type: &str) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &Shape::default(), 3);
    let all: Vec<u32> = (0..case.v as u32).collect();
    let mut mask = SamplingMask::default();
    (0..case.tokens()).for_each(|_| mask.push(&all));
    let masked = case.with_batch(|batch| batch.with_sampling_mask(mask).unwrap());
    for (name, implementation, tiling) in implementations() {
        let mut plan = plan(&CpuBackend::new(), &case.request(&loss, implementation, tiling));
        let (of_all, of_mask) = (run(&mut *plan, &case), run(&mut *plan, &masked));
        assert_eq!((of_all.loss, &of_all.scores), (of_mask.loss, &of_mask.scores), "{name}");
        assert_eq!(
            (of_all.hidden, of_all.lm_head, of_all.bias),
            (of_mask.hidden, of_mask.lm_head, of_mask.bias),
            "{name}"
        );
    }
}

#[rstest]
fn precomputed_logits_have_gradients_at_kept_ids_only(
    #[values("grpo", "bnpo", "gspo", "softcap")] loss_type: &str,
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
) {
    let loss = loss(loss_type);
    let case = Case::new(&loss, &Shape { dtype, bias: false, sampling_mask: true, ..Shape::default() }, 3);
    let logit =
        |row: usize, j: usize| (0..case.h).map(|k| case.hidden[row * case.h + k] * case.lm_head[j * case.h + k]).sum();
    let z = Tensor::new((0..case.tokens() * case.v).map(|at| logit(at / case.v, at % case.v)).collect(), dtype);
    let expected = evaluate(&loss, &Policy::logits(&z.in_f64(), case.v), &case.batch).unwrap();
    let size = [case.tokens(), case.v];
    let mut plan = plan(&CpuBackend::new(), &logits_request(&loss, implementation, Tiling::default(), size, dtype));
    let (got, gradient) = run_logits(&mut *plan, &z, &case.batch);
    assert!((got.loss / expected.loss - 1.0).abs() <= 2e-6, "{} for {}", got.loss, expected.loss);
    let off = difference(&gradient, &expected.grad_logits);
    assert!(off <= EXACT, "gradient is off by {off:e}");
    for &row in case.batch.active_rows() {
        let Some(ids) = case.batch.kept(row) else { continue };
        let others = (0..case.v).filter(|j| !ids.contains(&(*j as u32)));
        others.for_each(|j| assert_eq!(gradient[row * case.v + j], 0.0));
    }
}

#[test]
fn masks_that_do_not_fit_a_batch_are_refused() {
    let batch = || TokenBatch::packed(vec![3, 7, -100], vec![0, 2, 3]).unwrap().with_mask(&[1.0, 1.0, 0.0]).unwrap();
    let mask = |offsets: &[usize], ids: &[u32]| SamplingMask::new(offsets, ids).unwrap();
    let message = |mask| batch().with_sampling_mask(mask).unwrap_err().to_string();
    assert!(message(mask(&[0, 0, 0], &[])).contains("sampling_mask [N]"));
    let missing = message(mask(&[0, 2, 4, 4], &[3, 1, 8, 9]));
    assert!(missing.contains("token 1 (sequence 0, position 1)") && missing.contains("target 7"), "{missing}");
    // Tokens that become active are checked, too; ids of masked tokens have no effect.
    let masked = batch().with_sampling_mask(mask(&[0, 2, 4, 5], &[3, 1, 8, 7, 99])).unwrap();
    assert!(masked.validate_targets(9).is_ok() && masked.with_mask(&[1.0; 3]).is_err());
    let large = batch().with_sampling_mask(mask(&[0, 2, 3, 3], &[3, 50, 7])).unwrap().validate_targets(10).unwrap_err();
    assert!(large.to_string().contains("id 50 is outside the vocabulary of 10"), "{large}");
    for (offsets, ids, words) in [
        (&[0, 1][..], &[1, 2][..], "from 0 to 2"),
        (&[1, 2], &[1, 2], "from 0 to 2"),
        (&[0, 2, 1, 2], &[1, 2], "smaller"),
    ] {
        let error = SamplingMask::new(offsets, ids).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
