//! Adapters, value heads and quantised weights of the CPU policy, for every family; sampling from large weights.

mod batch_sizes;
// Each test binary uses some of it.
#[allow(dead_code)]
#[path = "../../../../tests/checkpoints/checkpoint.rs"]
mod checkpoint;
mod lora;
mod quantization;
#[path = "../support/mod.rs"]
mod support;
mod value_head;

grpo_testkit::tiers!();
