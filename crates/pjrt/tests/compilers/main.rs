//! Compiles for devices that are not present.

#[path = "../support/mod.rs"]
mod support;

mod cuda;
mod tpu;

testkit::tiers!();
