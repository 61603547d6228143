//! Compiles for devices that are not present.

#[path = "../support/mod.rs"]
mod support;

mod cuda;
mod tpu;

grpo_testkit::tiers!();
