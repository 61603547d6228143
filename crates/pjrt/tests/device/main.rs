//! Plugins on real devices: XLA's CPU.

#[path = "../support.rs"]
mod support;

mod compile_cache;
mod cpu;
