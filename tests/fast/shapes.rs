//! Shapes on this CPU, with every implementation.

use backend_cpu::CpuBackend;
use grpo_core::Dtype;
use grpo_tests::shapes::{LOSSES, ONE_HIDDEN_UNIT, assert_shape, models, ugly};
use rstest::rstest;

#[rstest]
fn every_shape_matches_the_oracle_on_cpu(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let shapes = models().chain(ugly()).chain([("H1".to_owned(), ONE_HIDDEN_UNIT)]);
    for (name, shape) in shapes {
        assert_shape(&CpuBackend::new(), &name, shape, &LOSSES, dtype);
    }
}
