//! The fused loops with all kinds of tiles: size one, sizes that do not divide, sizes larger than the tensor.

use crate::evaluation::{DTYPES, check_on};
use crate::{SMALL, backend, chunks, cispo, grpo, gspo, on_mesh, panels};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, Tiling};
use rstest::rstest;
use testkit::{Case, Shape};

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

/// Every tiling is tested with every row. Together the rows cover each pair of dtype, layout, bias and gradients.
#[rstest]
#[case::all(grpo(), Dtype::F32, HeadLayout::VocabHidden, ALL)]
#[case::all_of_bf16(cispo(), Dtype::Bf16, HeadLayout::VocabHidden, ALL_WITH_BIAS)]
#[case::all_of_a_sequence(gspo(), Dtype::F32, HeadLayout::HiddenVocab, ALL)]
#[case::all_of_a_sequence_of_bf16(gspo(), Dtype::Bf16, HeadLayout::HiddenVocab, ALL_WITH_BIAS)]
#[case::hidden(cispo(), Dtype::F32, HeadLayout::VocabHidden, HIDDEN)]
#[case::hidden_of_bf16(grpo(), Dtype::Bf16, HeadLayout::HiddenVocab, HIDDEN_BESIDE_BIAS)]
#[case::head(gspo(), Dtype::F32, HeadLayout::VocabHidden, HEAD_WITH_BIAS)]
#[case::head_of_bf16(cispo(), Dtype::Bf16, HeadLayout::HiddenVocab, HEAD)]
fn every_tiling_matches_the_oracle(
    #[case] loss: LossConfig,
    #[case] dtype: Dtype,
    #[case] layout: HeadLayout,
    #[case] (bias, gradients): Asked,
) {
    let case = Case::new(&loss, &Shape { dtype, layout, bias, ..SMALL }, 3);
    for (name, tiling) in tilings() {
        let request = PlanRequest { gradients, ..case.request(&loss, Implementation::Fused, tiling) };
        let name = format!("{:?} {} {layout:?} {gradients:?}: {name}", loss.loss_type, dtype.name());
        check_on(&backend(), &name, &case, &request);
    }
}

/// The implementations without tiles.
#[rstest]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
fn dense_programs_match_the_oracle(
    #[case] loss: LossConfig,
    #[values(Implementation::Reference, Implementation::Logits)] implementation: Implementation,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
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
#[case::reference(Implementation::Reference, Tiling::default())]
#[case::logits(Implementation::Logits, Tiling::default())]
#[case::chunks(Implementation::Fused, chunks(200))]
#[case::panels(Implementation::Fused, panels(16))]
fn sequences_are_summed_over_blocks_of_tokens(
    #[case] implementation: Implementation,
    #[case] tiling: Tiling,
    #[values((1, 1), (2, 1))] mesh: (usize, usize),
) {
    let case = Case::new(&gspo(), &Shape { lengths: &[600, 0, 3, 420, 30], ..SMALL }, 11);
    let request = case.request(&gspo(), implementation, tiling);
    let name = format!("{} of {} tokens on {mesh:?}", implementation.name(), case.batch.tokens());
    check_on(&on_mesh(mesh.0, mesh.1), &name, &case, &request);
}
