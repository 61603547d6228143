//! Programs that exchange lines of JSON with a run: reward programs, and environments of conversations. This module is for other crates of
//! grpo and may change in any release.

pub use crate::external::process::{Launch, Process, Stop};
pub use crate::external::{MAX_WORKERS, back_off, shown};
