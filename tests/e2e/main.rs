//! The binary `grpo` as its users call it.

mod attacks;
mod bench;
mod config;
mod damage;
mod data;
mod device_lost;
mod device_policy;
mod diverged;
mod errors;
mod export;
mod files;
mod gradcheck;
mod hub;
mod learning;
mod manners;
mod memory;
mod model_folder;
mod parity_model;
mod plugins;
mod report;
mod resume;
mod rewards;
mod run_folder;
mod sinks;
mod support;
mod tiny_model;
