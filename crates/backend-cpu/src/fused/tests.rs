//! Tests of the fused head with products of tiles, on any machine: packing, cached blocks and output equal the
//! AMX path; [`crate::arch::tiles`] replaces its instructions if the machine has none.

use super::*;
use crate::arch::{Isa, IsaToken};
use crate::plan::CpuPlan;
use crate::threads::Threads;
use grpo_core::{Dtype, GradientSpec, GradsMut, Implementation, LossConfig, LossPlan, PolicySpec, Tiling};
use grpo_testkit::{Case, Differences, Output, ROUNDED, Shape, assert_flows, difference, loss, run};
use rstest::rstest;

/// Words of a piece: 16, so that small shapes have many pieces, and 128, as with AMX.
const FEW: usize = 16;
const MANY: usize = 128;

fn problem(gemm: Gemm, request: &PlanRequest) -> Problem {
    let PolicySpec::Hidden { hidden, layout, .. } = request.policy else { unreachable!("cases have a head") };
    let mut problem = Problem::new(request, hidden, layout, gemm.isa(), Dtype::Bf16, false);
    problem.gemm = gemm;
    problem
}

fn plan(gemm: Gemm, request: &PlanRequest, slots: usize) -> Box<dyn LossPlan> {
    let problem = problem(gemm, request);
    let blocking = choose(request, &problem, slots).unwrap();
    let head = || FusedHead::new(request, problem, blocking);
    CpuPlan::boxed(request, problem.workspace(&blocking), &Threads::default(), head).unwrap()
}

/// Returns products of tiles in pieces of `words` words, packed by the baseline and by the fastest instruction set.
fn tiles(words: usize) -> [Gemm; 2] {
    [Isa::Portable.checked().unwrap(), IsaToken::detect()].map(|isa| Gemm::of_tiles(isa, words))
}

/// Returns tilings with chunks of fewer tokens than a lhs panel, than a piece, than are packed at a time, and of all
/// tokens.
fn tilings() -> Vec<(Implementation, Tiling)> {
    let orders = [LoopOrder::TokenChunks, LoopOrder::VocabPanels].map(Some);
    let chunks = [Some(15), Some(70), Some(257), None];
    let blocks = [Some(512), None];
    let tilings = orders.into_iter().flat_map(|loop_order| {
        chunks.into_iter().flat_map(move |token_chunk| {
            blocks.map(|vocab_block| Tiling { loop_order, token_chunk, vocab_block, ..Tiling::default() })
        })
    });
    let fused = tilings.map(|tiling| (Implementation::Fused, tiling));
    fused.chain([(Implementation::Logits, Tiling::default())]).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Compares every tiling with the oracle, and with f32 products of dlogits that are rounded to bf16, too. Scores and dH
/// must be bit-identical for all tilings.
fn check(loss: &LossConfig, case: &Case, words: usize) {
    let expected = case.oracle(loss);
    assert_flows(&expected);
    for gemm in tiles(words) {
        let mut first: Option<Output> = None;
        for (implementation, tiling) in tilings() {
            let name = format!("{gemm:?} {tiling:?}");
            let request = case.request(loss, implementation, tiling);
            let mut planned = plan(gemm, &request, 3);
            let got = run(&mut *planned, case);
            Differences::new(&got, &expected).assert_within(ROUNDED, &name);
            assert_eq!(planned.score(case.policy(), &case.batch).unwrap(), got.scores, "{name}");
            let other = run(&mut *plan(Gemm::new(gemm.isa(), false), &request, 3), case);
            let gradients = [(&got.hidden, &other.hidden), (&got.lm_head, &other.lm_head), (&got.bias, &other.bias)];
            for (got, other) in gradients {
                // Some dlogits are close to halfway between two bf16, and may round differently.
                let off = difference(got, &wide(other));
                assert!(off <= 1e-3, "{name}: {off:e} from what f32 products make of it");
            }
            let first = first.get_or_insert_with(|| got.clone());
            assert!(got.scores == first.scores && got.hidden == first.hidden, "{name}: bits");
        }
    }
}

/// Returns cases: ragged, sequences longer than chunks, tiles, more tiles than are packed at a time, one token, one unit,
/// temperatures, softcap, sampling mask.
fn cases() -> [(&'static str, Shape<'static>); 9] {
    [
        ("dapo", Shape { lengths: &[300, 261], h: 70, v: 97, ..Shape::default() }),
        ("gspo", Shape { lengths: &[70, 20, 61], h: 33, v: 97, lean: 0.2, ..Shape::default() }),
        ("gspo", Shape { lengths: &[9, 20, 8], h: 33, v: 1013, ..Shape::default() }),
        ("dapo", Shape { lengths: &[30, 20], h: 20, v: 4700, ..Shape::default() }),
        ("dapo", Shape { lengths: &[1], h: 600, v: 63, ..Shape::default() }),
        ("dapo", Shape { lengths: &[40, 30], h: 1, v: 513, ..Shape::default() }),
        ("cispo", Shape { lengths: &[40, 50], h: 40, v: 600, bias: false, temperatures: true, ..Shape::default() }),
        ("softcap", Shape { lengths: &[40, 60], h: 40, v: 600, ..Shape::default() }),
        ("dapo", Shape { lengths: &[40, 60], h: 40, v: 1100, sampling_mask: true, ..Shape::default() }),
    ]
}

/// Tests every second case from `first` on.
fn check_cases(first: usize, layout: HeadLayout) {
    for (loss_type, shape) in cases().into_iter().skip(first).step_by(2) {
        println!("{loss_type} {shape:?}");
        let loss = loss(loss_type);
        check(&loss, &Case::new(&loss, &Shape { dtype: Dtype::Bf16, layout, ..shape }, 23), FEW);
    }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::vocab_hidden(1, HeadLayout::VocabHidden)]
#[ignore = "GRPO_TESTS=all"]
#[case::hidden_vocab(0, HeadLayout::HiddenVocab)]
fn tile_products_with_the_other_layout_match_the_oracle(#[case] first: usize, #[case] layout: HeadLayout) {
    check_cases(first, layout);
}

/// Pieces of the length that AMX uses: more tokens, hidden units and entries than one piece, and more tokens than are
/// packed at a time.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::pieces(Shape { lengths: &[200, 100], h: 270, v: 290, ..Shape::default() })]
#[ignore = "GRPO_TESTS=all"]
#[case::many_tokens(Shape { lengths: &[1100, 1000], h: 24, v: 70, ..Shape::default() })]
fn pieces_of_amx_length_match_the_oracle(
    #[case] shape: Shape<'_>,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss("dapo");
    check(&loss, &Case::new(&loss, &Shape { dtype: Dtype::Bf16, layout, ..shape }, 31), MANY);
}

/// Leaving out one gradient does not change the others.
#[rstest]
fn omitted_gradients_do_not_change_others_with_tile_products(
    #[values(true, false)] hidden: bool,
    #[values(true, false)] lm_head: bool,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
) {
    let loss = loss("grpo");
    let shape = Shape { lengths: &[60, 50], h: 40, v: 600, dtype: Dtype::Bf16, layout, ..Shape::default() };
    let (case, gemm) = (Case::new(&loss, &shape, 37), Gemm::of_tiles(IsaToken::detect(), FEW));
    for (implementation, tiling) in tilings() {
        let mut request = case.request(&loss, implementation, tiling);
        let all = run(&mut *plan(gemm, &request, 2), &case);
        request.gradients = GradientSpec { hidden, lm_head, bias: false };
        let (mut dh, mut dw) = (vec![0.0; all.hidden.len()], vec![0.0; all.lm_head.len()]);
        let grads = GradsMut {
            hidden: hidden.then_some(dh.as_mut_slice().into()),
            lm_head: lm_head.then_some(dw.as_mut_slice().into()),
            ..GradsMut::default()
        };
        let out = plan(gemm, &request, 2).value_and_grad(case.policy(), &case.batch, grads).unwrap();
        assert_eq!(out.loss, all.loss, "{request:?}");
        assert!(!hidden || dh == all.hidden, "{request:?}");
        assert!(!lm_head || dw == all.lm_head, "{request:?}");
    }
}

#[test]
fn tile_products_add_to_existing_gradients() {
    let loss = loss("dapo");
    let shape = Shape { lengths: &[60, 50], h: 40, v: 600, dtype: Dtype::Bf16, ..Shape::default() };
    let (case, gemm) = (Case::new(&loss, &shape, 41), Gemm::of_tiles(IsaToken::detect(), FEW));
    for (implementation, tiling) in tilings() {
        let mut plan = plan(gemm, &case.request(&loss, implementation, tiling), 2);
        let once = run(&mut *plan, &case);
        let mut twice = once.clone();
        grpo_testkit::accumulate(&mut *plan, &case, &mut twice);
        for (once, twice) in [(&once.hidden, &twice.hidden), (&once.lm_head, &twice.lm_head)] {
            let doubled: Vec<f64> = once.iter().map(|x| 2.0 * f64::from(*x)).collect();
            assert!(difference(twice, &doubled) <= 1e-6);
        }
    }
}

/// Returns the bytes of a head's buffers.
fn allocated(head: &FusedHead) -> usize {
    let Workspace { x, x_for_head, panel, dh, partials, sums, gathered_dlogits, tokens, tiled_rows, slots } =
        &head.work;
    let slot_bytes = |slot: &Slot| {
        let gathered_words = slot.gathered_hidden.len() + slot.kept_logits.len();
        4 * (slot.head.len() + slot.dlogits.len() + slot.rows.len() + slot.near.len() + gathered_words)
            + size_of::<Slot>()
    };
    4 * (x.len() + x_for_head.len() + panel.len() + dh.len() + gathered_dlogits.len())
        + size_of_val(&partials[..])
        + size_of_val(&sums[..])
        + size_of_val(&tokens[..])
        + size_of::<usize>() * (tiled_rows.capacity() + head.live.capacity())
        + slots.iter().map(slot_bytes).sum::<usize>()
        + TokenState::BYTES * head.problem.kept(&head.blocking)
}

#[rstest]
fn reported_workspace_equals_allocations(
    #[values("grpo", "gspo")] loss_type: &str,
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values(FEW, MANY)] words: usize,
) {
    let loss = loss(loss_type);
    let gemms = tiles(words).into_iter().chain(IsaToken::available().map(|isa| Gemm::new(isa, true)));
    for gemm in gemms {
        for (n, h, v) in [(1, 1, 1), (40, 33, 1013), (300, 160, 4700), (2500, 40, 100)] {
            for (implementation, tiling) in tilings() {
                for budget in [2 << 20, 8 << 20] {
                    let request = PlanRequest {
                        loss: loss.clone().into(),
                        implementation,
                        tiling: Tiling { workspace_budget: budget, ..tiling.clone() },
                        max_tokens: n,
                        policy: PolicySpec::Hidden { hidden: h, vocab: v, dtype: Dtype::Bf16, layout, bias: false },
                        gradients: GradientSpec { hidden: true, lm_head: true, bias: false },
                    };
                    let problem = problem(gemm, &request);
                    let Ok(blocking) = choose(&request, &problem, 3) else { continue };
                    let planned = problem.workspace(&blocking);
                    assert!(implementation == Implementation::Logits || planned <= budget, "{blocking:?}");
                    let made = allocated(&FusedHead::new(&request, problem, blocking));
                    let evaluator = crate::plan::evaluator_bytes(n);
                    assert_eq!(made, planned - evaluator, "{gemm:?} {n} {h} {v} {blocking:?}");
                }
            }
        }
    }
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[rstest]
    #[case::vocab_hidden(0, HeadLayout::VocabHidden)]
    #[case::hidden_vocab(1, HeadLayout::HiddenVocab)]
    fn tile_products_match_the_oracle(#[case] first: usize, #[case] layout: HeadLayout) {
        check_cases(first, layout);
    }
}
