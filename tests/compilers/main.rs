//! What the compilers of TPUs and GPUs say through the binary `grpo`.

mod aot;
mod aot_run;
#[allow(dead_code)] // the tests of the command line take more of it
#[path = "../e2e/support.rs"]
mod support;
