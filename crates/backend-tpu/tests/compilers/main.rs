//! Compiles programs and kernels for TPUs.

mod mosaic;
mod programs;

testkit::tiers!();
