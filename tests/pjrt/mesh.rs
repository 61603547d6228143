//! Eight virtual devices: tokens split one way, the vocabulary the other. The numbers are those of one device.

use crate::case::{Case, Shape, chunks, panels};
use crate::evaluation::check;
use crate::{cispo, grpo, gspo, on_mesh};
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig, Tiling};
use rstest::rstest;

/// (data, vocab)
const MESHES: [(usize, usize); 8] = [(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 2)];

fn implementations() -> [(&'static str, Implementation, Tiling); 4] {
    [
        ("reference", Implementation::Reference, Tiling::default()),
        ("logits", Implementation::Logits, Tiling::default()),
        ("chunks", Implementation::Fused, chunks(3)),
        ("panels", Implementation::Fused, panels(5)),
    ]
}

/// N = 16 and 23, V = 61 (no multiple of anything) and 64; sequences that devices cut, gradients that begin with the
/// caller's sums.
#[rstest]
#[case::grpo(grpo())]
#[case::gspo(gspo())]
fn every_mesh_is_the_oracle(#[case] loss: LossConfig, #[values(0, 1, 2, 3)] implementation: usize) {
    let (name, implementation, tiling) = implementations().into_iter().nth(implementation).unwrap();
    for (i, (data, vocab)) in MESHES.into_iter().enumerate() {
        // They take turns; every mesh meets all of them with one loss and implementation or another.
        let turn = i + i / 4 + loss.loss_type as usize + name.len();
        let shape = Shape {
            lengths: [&[5, 0, 1, 7, 3][..], &[11, 2, 9, 1]][turn % 2],
            v: [61, 64][turn / 2 % 2],
            dtype: [Dtype::F32, Dtype::Bf16][turn % 2],
            layout: [HeadLayout::VocabHidden, HeadLayout::HiddenVocab][turn / 2 % 2],
            bias: !turn.is_multiple_of(3),
            ..Shape::default()
        };
        let case = Case::new(&loss, shape, turn as u64);
        let request = case.request(&loss, implementation, tiling.clone());
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let name = format!("{data} x {vocab} {:?} {name} V {} {}", loss.loss_type, shape.v, shape.dtype.name());
        check(&name, &mut plan, &case, &loss, request.gradients);
    }
}

/// A larger vocabulary that does not divide, in both layouts.
#[rstest]
fn an_odd_vocabulary(
    #[values(HeadLayout::VocabHidden, HeadLayout::HiddenVocab)] layout: HeadLayout,
    #[values((1, 8), (2, 4))] (data, vocab): (usize, usize),
) {
    let loss = cispo();
    let case = Case::new(&loss, Shape { v: 1013, layout, bias: true, ..Shape::default() }, 19);
    for (name, implementation, tiling) in
        [("chunks", Implementation::Fused, chunks(3)), ("panels", Implementation::Fused, panels(50))]
    {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        check(&format!("{data} x {vocab} {layout:?} {name}"), &mut plan, &case, &loss, request.gradients);
    }
}

/// More devices than tokens, or than vocabulary entries: some hold nothing but padding.
#[rstest]
fn devices_without_anything(#[values((8, 1), (1, 8), (4, 2))] (data, vocab): (usize, usize)) {
    let loss = grpo();
    let case = Case::new(&loss, Shape { lengths: &[3], v: 5, bias: true, ..Shape::default() }, 2);
    for (name, implementation, tiling) in implementations() {
        let request = case.request(&loss, implementation, tiling);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        check(&format!("{data} x {vocab} {name}"), &mut plan, &case, &loss, request.gradients);
    }
}

#[rstest]
fn given_logits_on_a_mesh(
    #[values((8, 1), (1, 8), (2, 4), (4, 2))] (data, vocab): (usize, usize),
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, Shape { dtype, ..Shape::default() }, 3);
        let request = crate::logits::request(&case, &loss, Implementation::Logits);
        let mut plan = on_mesh(data, vocab).plan_on_device(&request).unwrap();
        let name = format!("{data} x {vocab} {:?} {}", loss.loss_type, dtype.name());
        crate::logits::check(&name, &mut plan, &case, &loss);
    }
}
