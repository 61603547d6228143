#![doc = include_str!("../README.md")]
//! [`Environments`] are the environments of a run by name, [`ToolParser`] finds the tool calls in the text of a model.
#![forbid(unsafe_code)]

mod built_in;
mod config;
mod environment;
mod environments;
mod error;
mod openenv;
mod program;
mod tool_calls;

pub use built_in::{Calculator, WordGuess, evaluate};
pub use config::{BuiltIn, EnvironmentConfig};
pub use environment::{Environment, Episode, Failure, Reply, Start, check_messages};
pub use environments::Environments;
pub use error::{Error, Result};
pub use openenv::OpenEnv;
pub use program::EnvironmentProgram;
pub use tool_calls::{Parsed, ToolCall, ToolParser};
