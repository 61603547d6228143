//! Programs and servers that exchange JSON with a run: rewards, and environments of conversations. This module is for other crates of grpo and
//! may change in any release.

pub use crate::external::process::{Launch, Process, Stop};
pub use crate::external::{MAX_WORKERS, answer, back_off, expand, lock, parsed, seconds, shown};
