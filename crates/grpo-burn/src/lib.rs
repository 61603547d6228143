#![doc = include_str!("../README.md")]
//! Backend and implementation of [`GrpoLoss`] are configuration; see `examples/embed.rs`.
//!
//! Legend: N tokens (rows), B sequences, T positions, H hidden size, V vocabulary.
#![forbid(unsafe_code)]

pub mod custom_op;
mod error;
mod grpo_loss;
mod input;
mod operand;

pub use error::{Error, Result};
pub use grpo_loss::{GrpoLoss, Loss};
