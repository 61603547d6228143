//! Rewards from configurations. These tests need only Rust and a shell.

mod answers;
mod built_in;
#[cfg(all(unix, feature = "http"))]
mod http;
mod math;
#[cfg(unix)]
mod programs;
mod support;

grpo_testkit::tiers!();
