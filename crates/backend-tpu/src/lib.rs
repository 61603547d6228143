//! The GRPO loss on any PJRT device: TPU, GPU, XLA's CPU.
//!
//! [`program`] writes the loss as StableHLO, [`PjrtBackend`] compiles and runs it behind [`grpo_core::Backend`].
#![forbid(unsafe_code)]

pub mod aot;
mod backend;

pub mod compile_options;
mod devices;
mod error;
pub mod mosaic;
mod operands;
mod plan;
pub mod plugins;
pub mod program;
mod shard;
mod tables;
mod tensor;
mod tiling;

pub use backend::PjrtBackend;
pub use plan::{DeviceOutput, PjrtPlan};
pub use tensor::PjrtTensor;
