//! Rewards by configuration: nothing but Rust and a shell.

mod built_in;
#[cfg(unix)]
mod http;
mod math;
#[cfg(unix)]
mod programs;
mod support;
