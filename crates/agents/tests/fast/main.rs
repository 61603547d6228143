//! Environments outside of this process: programs and servers.

mod endpoint;
mod openenv;
mod programs;
mod protocols;

grpo_testkit::tiers!();
