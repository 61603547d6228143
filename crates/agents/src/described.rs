//! Environments of a process that starts no conversations.

use crate::agent::{Agent, Connection};
use crate::environment::{Environment, Failure, Start};
use grpo_data::Item;
use serde_json::Value;

/// An environment or an agent that another process runs, with the tools that the configuration names.
pub(crate) struct Described(pub(crate) Option<Value>);

impl Described {
    fn failure() -> Failure {
        Failure::new("it was described and not opened, and starts no conversation in this process")
    }
}

impl Environment for Described {
    fn tools(&self) -> Option<&Value> {
        self.0.as_ref()
    }

    fn reset(&self, _: &Item, _: usize) -> Result<Start, Failure> {
        Err(Self::failure())
    }
}

impl Agent for Described {
    fn run(&self, _: &Item, _: &Connection, _: usize) -> Result<Option<f32>, Failure> {
        Err(Self::failure())
    }
}
