//! Plugins on real devices, XLA's CPU.

#[path = "../support/mod.rs"]
mod support;

mod compile_cache;
mod cpu;
