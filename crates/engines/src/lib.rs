#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(feature = "http")]
mod completion;
mod config;
#[cfg(feature = "http")]
mod engine;
mod error;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod protocol;
#[cfg(feature = "http")]
mod server;
#[cfg(feature = "http")]
mod sglang;
#[cfg(feature = "http")]
mod vllm;
#[cfg(feature = "http")]
mod weights;

pub use config::{EngineKind, ServerConfig};
#[cfg(feature = "http")]
pub use engine::{Run, ServerEngine};
pub use error::{Error, Result};
