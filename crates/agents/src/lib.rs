#![doc = include_str!("../README.md")]
//! [`Environments`] are the environments of a run by name, [`ToolParser`] finds the tool calls in the text of a model, and an [`Endpoint`]
//! answers agents.
#![forbid(unsafe_code)]

mod agent;
mod agent_program;
mod built_in;
mod config;
mod described;
pub mod endpoint;
mod environment;
mod environments;
mod error;
#[cfg(feature = "http")]
mod openenv;
mod program;
mod reasoning;
mod tool_calls;

pub use agent::{Agent, Connection};
pub use agent_program::AgentProgram;
pub use built_in::{Calculator, WordGuess, evaluate};
pub use config::{BuiltIn, EnvironmentConfig};
pub use endpoint::Endpoint;
pub use environment::{Environment, Episode, Failure, Outcome, Reply, Start, check_messages};
pub use environments::Environments;
pub use error::{Error, Result};
#[cfg(feature = "http")]
pub use openenv::OpenEnv;
pub use program::EnvironmentProgram;
pub use reasoning::{ReasoningParser, opens_thoughts, reasoning_tags};
pub use tool_calls::{Parsed, ToolCall, ToolParser};
