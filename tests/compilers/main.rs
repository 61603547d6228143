//! Tests of `grpo aot` with the compilers of TPUs and GPUs.

mod aot;
mod aot_run;
mod plan;
#[allow(dead_code)] // the tests of the command line take more of it
#[path = "../e2e/support.rs"]
mod support;

grpo_testkit::tiers!();
