//! Compiles programs and kernels for TPUs.

mod mosaic;
mod programs;

grpo_testkit::tiers!();
