//! Reward functions outside of this process: programs and HTTP endpoints, which exchange the same JSON.

mod group;
mod http;
mod message;
mod program;
mod worker;

pub use group::kill_programs;
pub use http::{Http, HttpConfig};
pub use program::{Program, ProgramConfig};
