//! Compares the CPU backend with the f64 oracle: every implementation, loss, shape, dtype, instruction set and
//! blocking.

mod contract;
mod experts;
mod grpo_loss;
mod metrics;
mod oracle;
mod parity;
mod transforms;
mod traps;

grpo_testkit::tiers!();
