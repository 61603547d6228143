#![doc = include_str!("../README.md")]
//! `examples/embed/burn` of the repository is a training loop.
//!
//! Legend: N tokens (rows), B sequences, T positions, H hidden size, V vocabulary.
#![forbid(unsafe_code)]

pub mod custom_op;
mod error;
mod grpo_loss;
mod input;
mod operand;

pub use error::{Error, Result};
pub use grpo_loss::{GrpoLoss, GrpoLossBuilder, Loss};

/// The version of burn whose tensors the loss takes.
pub use burn;
