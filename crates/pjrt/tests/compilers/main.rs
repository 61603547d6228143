//! Plugins as compilers for devices that are not there.

#[path = "../support.rs"]
mod support;

mod cuda;
mod tpu;
