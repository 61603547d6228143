//! Compiles programs with XLA, runs them on the CPU plugin, and compares them with the interpreter.

mod derivative;
mod device;
mod interpreter;
mod sharding;
