#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod completion;
mod config;
mod engine;
mod error;
mod http;
mod protocol;
mod server;
mod sglang;
mod vllm;
mod weights;

pub use config::{EngineKind, ServerConfig};
pub use engine::{Run, ServerEngine};
pub use error::{Error, Result};
