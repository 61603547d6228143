//! Shapes on this CPU, with every implementation.

use grpo_backend_cpu::CpuBackend;
use grpo_core::Dtype;
use grpo_tests::shapes::{LOSSES, ONE_HIDDEN_UNIT, assert_shape, models, ugly};
use grpo_tests::synthetic::Shape;
use rstest::rstest;

fn shapes() -> impl Iterator<Item = (String, Shape)> {
    models().chain(ugly()).chain([("H1".to_owned(), ONE_HIDDEN_UNIT)])
}

/// One loss for each shape and dtype.
#[test]
fn every_shape_matches_the_oracle_on_cpu() {
    for (index, (name, shape)) in shapes().enumerate() {
        for (dtype, loss) in [(Dtype::F32, index), (Dtype::Bf16, index + 3)] {
            let loss = LOSSES[loss % LOSSES.len()];
            assert_shape(&CpuBackend::new(), &name, shape, &[loss], dtype);
        }
    }
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_shape_matches_the_oracle_on_cpu_with_every_loss(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    for (name, shape) in shapes() {
        assert_shape(&CpuBackend::new(), &name, shape, &LOSSES, dtype);
    }
}
