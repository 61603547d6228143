//! Whole runs: every loss, every estimator of advantages, conversations, and restarts.

mod algorithm;
mod learning;
mod losses;
mod ppo;
mod restart;
#[path = "../support/mod.rs"]
mod support;

grpo_testkit::tiers!();
