//! Compiles every operation with XLA, runs it on the CPU plugin, and compares with plain Rust.

mod derivative;
mod device;
mod elementwise;
mod interpreter;
mod literals;
mod replicas;
mod scan;
mod shapes;
mod sharding;
