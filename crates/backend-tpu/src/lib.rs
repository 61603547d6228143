#![doc = include_str!("../README.md")]
//! [`PjrtBackend`] plans and runs the loss behind [`grpo_core::Backend`], with tensors on the host or on the devices; [`program`] writes the
//! loss as StableHLO; [`devices`] has tensors that are sharded over a mesh; [`aot`] compiles it for absent devices; [`plugins`] finds the plugin for a device.
#![forbid(unsafe_code)]

pub mod aot;
mod backend;
pub mod compile_options;
mod compiler;
pub mod devices;
mod error;
pub mod mosaic;
mod operands;
mod padding;
mod plan;
pub mod plugins;
pub mod program;
mod tables;
mod tensor;
mod tiling;

pub use backend::PjrtBackend;
pub use plan::{DeviceOutput, PjrtPlan};
pub use tables::TokenTables;
pub use tensor::PjrtTensor;
