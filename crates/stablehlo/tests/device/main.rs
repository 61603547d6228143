//! Every operation of the builder, compiled by XLA and run on its CPU plugin, beside plain Rust.

mod derivative;
mod device;
mod elementwise;
mod interpreter;
mod literals;
mod replicas;
mod scan;
mod shapes;
mod sharding;
