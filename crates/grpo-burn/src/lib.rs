//! The GRPO loss as a burn operation.
//!
//! [`GrpoLoss`] takes the output of a burn model (hidden states and LM head, or logits), passes it to any
//! [`grpo_core::Backend`], and returns a scalar tensor. Its backward step returns the gradients that were computed in the
//! forward pass, so that the rest of the model trains as with any other burn loss: `loss.backward()`.
//!
//! Tensors are on burn's CPU backend Flex, in f32 or bf16. They are read in place, and gradients become burn tensors
//! without a copy. The backend and the implementation are configuration; see `examples/embed.rs`.
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
