//! Whole runs: every loss, every estimator of advantages, and restarts.

mod algorithm;
mod losses;
mod ppo;
mod restart;
#[path = "../support/mod.rs"]
mod support;

testkit::tiers!();
