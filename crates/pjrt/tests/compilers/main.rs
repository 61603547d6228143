//! Plugins as compilers for devices that are not there.

#[path = "../support/mod.rs"]
mod support;

mod cuda;
mod tpu;
