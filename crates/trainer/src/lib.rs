//! The learning engine: a small decoder, verifiable tasks, rollouts and GRPO steps.
#![forbid(unsafe_code)]

pub mod dataset;
pub mod error;
pub mod model;
pub mod reward;
pub mod rng;
pub mod task;
pub mod tokenizer;
pub mod train_config;

pub use error::{Error, Result};
pub use train_config::TrainConfig;
