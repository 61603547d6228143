//! The binary `grpo` as its users call it.

mod adapter_as_model;
mod anywhere;
mod attacks;
mod bench;
mod changed_inputs;
mod config;
mod conversations;
mod damage;
mod data;
mod device_lost;
mod diverged;
mod doctor;
mod engines;
mod errors;
mod evaluation;
mod experts;
mod export;
#[allow(dead_code)] // the tests of the crate `engines` take more of it
#[path = "../../crates/engines/tests/fast/fake.rs"]
mod fake_server;
mod files;
mod gradcheck;
mod http;
mod hub;
mod init;
mod learning;
mod manners;
mod memory;
mod mesh;
mod model_folder;
mod nouns;
mod own_model;
mod parity_model;
mod pjrt_policy;
mod plan;
mod plugins;
mod process_environments;
mod processes;
mod quantization;
mod report;
mod resume;
mod rewards;
mod run_folder;
mod secrets;
mod sinks;
mod support;
mod tiny_model;

grpo_testkit::tiers!();
