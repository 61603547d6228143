//! The GRPO loss as a candle operation.
//!
//! [`GrpoLoss`] takes the output of a candle model (hidden states and LM head, or logits), passes it to any
//! [`grpo_core::Backend`], and returns a scalar tensor. Its backward step returns the gradients that were computed in the
//! forward pass, so that the rest of the model trains as with any other candle loss: `loss.backward()`.
//!
//! # Copies
//!
//! Tensors are on the CPU, in f32 or bf16. The loss reads contiguous storage in place, also a head that is a transposed view, and hands its
//! gradients to candle without a copy. The other copies of a step:
//!
//! | copy | bytes | reason |
//! |---|---|---|
//! | tensors of other strides | their size | kernels read row-major slices |
//! | logits | N V elements | they are overwritten with their gradient; candle has no exclusive access to a tensor's storage |
//! | gradients of bf16 tensors | half of their f32 size | a candle gradient has its tensor's dtype |
//! | gradients, if the loss was scaled | their size | the factor is known in the backward pass only |
//! | gradients, in candle's `backward` | twice their size | candle adds every gradient to a tensor of zeros |
//!
//! Legend: N tokens (rows), B sequences, T positions, H hidden size, V vocabulary.
#![forbid(unsafe_code)]

mod error;
mod grpo_loss;
mod operand;
mod precomputed;

pub use error::{Error, Result};
pub use grpo_loss::{GrpoLoss, Loss, token_batch};
