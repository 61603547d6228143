#![doc = include_str!("../README.md")]
//! # Copies
//!
//! Tensors are on the CPU, in f32 or bf16. The loss reads contiguous storage in place, also a head that is a transposed view. The copies of
//! a step:
//!
//! | copy | bytes | reason |
//! |---|---|---|
//! | tensors of other strides | their size | kernels read row-major slices |
//! | logits | N V elements | they are overwritten with their gradient; candle has no exclusive access to a tensor's storage |
//! | gradients of bf16 tensors | their size | kernels add in f32, and a candle gradient has its tensor's dtype |
//! | gradients in candle's graph | their size | candle adds each to zeros; [`Loss::backward`] does not, for variables |
//! | gradients, if the loss was scaled | their size | the factor is known in the backward pass only |
//!
//! Legend: N tokens (rows), B sequences, T positions, H hidden size, V vocabulary.
#![forbid(unsafe_code)]

mod error;
mod grpo_loss;
mod operand;
mod precomputed;

pub use error::{Error, Result};
pub use grpo_loss::{GrpoLoss, GrpoLossBuilder, Loss, token_batch};

/// The version of candle whose tensors the loss takes.
pub use candle_core;
