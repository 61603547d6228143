//! Processes that end, hang or come late: most of these tests wait for a limit of time.

mod faults;
#[path = "../support/mod.rs"]
mod support;
