//! Environments outside of this process: programs and servers.

#[cfg(feature = "http")]
mod endpoint;
#[cfg(feature = "http")]
mod openenv;
mod programs;
#[cfg(feature = "http")]
mod protocols;

grpo_testkit::tiers!();
