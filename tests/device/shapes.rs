//! Shapes as programs, with every implementation, with token-level ratios in f32 and sequence-level ratios in bf16.

use crate::backend;
use grpo_core::Dtype;
use grpo_tests::shapes::{LOSSES, ONE_HIDDEN_UNIT, assert_shape, models, ugly};
use rstest::rstest;

/// One shape of each kind.
#[test]
fn a_model_an_indivisible_shape_and_one_hidden_unit_match_the_oracle_on_pjrt() {
    let (name, shape) = models().last().unwrap();
    assert_shape(&backend(), &name, shape, &LOSSES[5..], Dtype::Bf16);
    let (name, shape) = ugly().last().unwrap();
    assert_shape(&backend(), &name, shape, &LOSSES[..1], Dtype::F32);
    assert_shape(&backend(), "H1", ONE_HIDDEN_UNIT, &LOSSES[..1], Dtype::F32);
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_shape_matches_the_oracle_on_pjrt(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let losses = if dtype == Dtype::F32 { &LOSSES[..1] } else { &LOSSES[5..] };
    for (name, shape) in models().chain(ugly()).chain([("H1".to_owned(), ONE_HIDDEN_UNIT)]) {
        assert_shape(&backend(), &name, shape, losses, dtype);
    }
}
