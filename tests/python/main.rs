//! Files of runs, and files for installation, read with the Python libraries and programs of their formats.

mod agents;
mod bench;
mod engines;
mod installable;
mod libraries;
mod openenv;
#[path = "../../crates/sinks/tests/python/readers/mod.rs"]
mod readers;
mod sinks;
#[allow(dead_code)] // the tests of the command line take more of it
#[path = "../e2e/support.rs"]
mod support;
#[allow(dead_code)]
#[path = "../e2e/tiny_model.rs"]
mod tiny_model;
mod vllm_families;

grpo_testkit::tiers!();
