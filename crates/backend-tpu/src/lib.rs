//! The GRPO loss on any PJRT device: TPU, GPU, XLA's CPU.
//!
//! [`program`] writes the loss as StableHLO, [`PjrtBackend`] compiles and runs it behind [`grpo_core::Backend`].
#![forbid(unsafe_code)]

pub mod aot;
mod backend;
mod blocking;
pub mod compile_options;
pub mod mosaic;
mod operands;
mod plan;
pub mod plugins;
pub mod program;
mod shard;
mod tables;
mod tensor;

pub use backend::PjrtBackend;
pub use plan::{DeviceOutput, PjrtPlan};
pub use tensor::PjrtTensor;

use grpo_core::Error;

pub(crate) const NAME: &str = "pjrt";

pub(crate) fn unsupported(what: &str, instead: &str) -> Error {
    Error::Unsupported { backend: NAME.into(), what: what.into(), instead: instead.into() }
}

/// What a plugin reports.
pub(crate) fn failed(error: pjrt::Error) -> Error {
    Error::Backend { backend: NAME.into(), message: error.to_string() }
}
