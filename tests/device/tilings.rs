//! The fused loops with all kinds of tiles: size one, sizes that do not divide, sizes larger than the tensor.

use crate::evaluation::{DTYPES, check_on};
use crate::{SMALL, backend, chunks, cispo, grpo, gspo, on_mesh, panels};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, Tiling};
use grpo_testkit::{Case, Shape};
use rstest::rstest;

/// Whether the head has a bias, and the requested gradients.
type Asked = (bool, GradientSpec);
const ALL: Asked = (false, GradientSpec { hidden: true, lm_head: true, bias: false });
const ALL_WITH_BIAS: Asked = (true, GradientSpec { hidden: true, lm_head: true, bias: true });
const HIDDEN: Asked = (false, GradientSpec { hidden: true, lm_head: false, bias: false });
const HIDDEN_BESIDE_BIAS: Asked = (true, GradientSpec { hidden: true, lm_head: false, bias: false });
const HEAD: Asked = (false, GradientSpec { hidden: false, lm_head: true, bias: false });
const HEAD_WITH_BIAS: Asked = (true, GradientSpec { hidden: false, lm_head: true, bias: true });

/// Tilings for N = 16 and V = 61.
fn tilings() -> Vec<(String, Tiling)> {
    let of_tokens = [1, 3, 5, 16, 40].map(|size| (format!("chunks of {size}"), chunks(size)));
    let of_vocab = [1, 7, 16, 61, 100].map(|size| (format!("panels of {size}"), panels(size)));
    of_tokens.into_iter().chain(of_vocab).collect()
}

/// A loss, dtype, layout and requested gradients.
type Row = (LossConfig, Dtype, HeadLayout, Asked);

/// Together the rows cover each pair of dtype, layout, bias and gradients.
fn rows() -> [Row; 8] {
    [
        (grpo(), Dtype::F32, HeadLayout::VocabHidden, ALL),
        (cispo(), Dtype::Bf16, HeadLayout::VocabHidden, ALL_WITH_BIAS),
        (gspo(), Dtype::F32, HeadLayout::HiddenVocab, ALL),
        (gspo(), Dtype::Bf16, HeadLayout::HiddenVocab, ALL_WITH_BIAS),
        (cispo(), Dtype::F32, HeadLayout::VocabHidden, HIDDEN),
        (grpo(), Dtype::Bf16, HeadLayout::HiddenVocab, HIDDEN_BESIDE_BIAS),
        (gspo(), Dtype::F32, HeadLayout::VocabHidden, HEAD_WITH_BIAS),
        (cispo(), Dtype::Bf16, HeadLayout::HiddenVocab, HEAD),
    ]
}

fn check_tiling((loss, dtype, layout, (bias, gradients)): &Row, (name, tiling): (String, Tiling)) {
    let case = Case::new(loss, &Shape { dtype: *dtype, layout: *layout, bias: *bias, ..SMALL }, 3);
    let request = PlanRequest { gradients: *gradients, ..case.request(loss, Implementation::Fused, tiling) };
    let name = format!("{:?} {} {layout:?} {gradients:?}: {name}", loss.loss_type, dtype.name());
    check_on(&backend(), &name, &case, &request);
}

/// Each tiling and each row at least once.
#[test]
fn every_tiling_matches_the_oracle() {
    for (row, tiling) in rows().iter().cycle().zip(tilings()) {
        check_tiling(row, tiling);
    }
}

/// Each tiling with every loss, dtype, layout, bias and every kind of gradients: half of the rows have them all.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_tiling_with_every_setting_matches_the_oracle(#[values(0, 1, 2, 3, 4, 5, 6, 7)] row: usize) {
    let first = usize::from(![0, 3, 4, 7].contains(&row));
    tilings().into_iter().skip(first).step_by(2).for_each(|tiling| check_tiling(&rows()[row], tiling));
}

/// The implementations without tiles.
#[rstest]
#[case(grpo(), Implementation::Reference, HeadLayout::VocabHidden)]
#[case(gspo(), Implementation::Logits, HeadLayout::HiddenVocab)]
#[ignore = "GRPO_TESTS=all"]
#[case(gspo(), Implementation::Logits, HeadLayout::VocabHidden)]
#[ignore = "GRPO_TESTS=all"]
#[case(gspo(), Implementation::Reference, HeadLayout::HiddenVocab)]
#[ignore = "GRPO_TESTS=all"]
#[case(gspo(), Implementation::Reference, HeadLayout::VocabHidden)]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), Implementation::Reference, HeadLayout::HiddenVocab)]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), Implementation::Logits, HeadLayout::HiddenVocab)]
#[ignore = "GRPO_TESTS=all"]
#[case(grpo(), Implementation::Logits, HeadLayout::VocabHidden)]
fn dense_programs_match_the_oracle(
    #[case] loss: LossConfig,
    #[case] implementation: Implementation,
    #[case] layout: HeadLayout,
) {
    for dtype in DTYPES {
        let case = Case::new(&loss, &Shape { dtype, layout, bias: true, ..SMALL }, 3);
        let request = case.request(&loss, implementation, Tiling::default());
        let name = format!("{:?} {} {layout:?}: {}", loss.loss_type, dtype.name(), implementation.name());
        check_on(&backend(), &name, &case, &request);
    }
}

/// A plan without gradients still computes the loss.
#[rstest]
fn plan_without_gradients_computes_the_loss(#[values(chunks(3), panels(7))] tiling: Tiling) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &SMALL, 5);
        let gradients = GradientSpec { hidden: false, lm_head: false, bias: false };
        let request = PlanRequest { gradients, ..case.request(&loss, Implementation::Fused, tiling.clone()) };
        check_on(&backend(), "no gradient", &case, &request);
    }
}

/// Sequence-level ratios and metrics for so many tokens that they are compared in blocks: one sequence spans two blocks,
/// and no block size divides the number of tokens.
#[rstest]
#[case::chunks(Implementation::Fused, chunks(200), (2, 1))]
#[case::panels(Implementation::Fused, panels(16), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::chunks(Implementation::Fused, chunks(200), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::panels(Implementation::Fused, panels(16), (2, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::reference(Implementation::Reference, Tiling::default(), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::reference(Implementation::Reference, Tiling::default(), (2, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::logits(Implementation::Logits, Tiling::default(), (1, 1))]
#[ignore = "GRPO_TESTS=all"]
#[case::logits(Implementation::Logits, Tiling::default(), (2, 1))]
fn sequences_are_summed_over_blocks_of_tokens(
    #[case] implementation: Implementation,
    #[case] tiling: Tiling,
    #[case] mesh: (usize, usize),
) {
    let case = Case::new(&gspo(), &Shape { lengths: &[600, 0, 3, 420, 30], ..SMALL }, 11);
    let request = case.request(&gspo(), implementation, tiling);
    let name = format!("{} of {} tokens on {mesh:?}", implementation.name(), case.batch.tokens());
    check_on(&on_mesh(mesh.0, mesh.1), &name, &case, &request);
}
