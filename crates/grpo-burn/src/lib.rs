//! The GRPO loss as a burn operation.
//!
//! [`GrpoLoss`] takes what a burn model yields (hidden states and LM head, or logits), hands it to any
//! [`grpo_core::Backend`], and returns a scalar tensor. Its backward step hands out the gradients that were made in the
//! forward pass, so that the rest of the model trains as with any other burn loss: `loss.backward()`.
//!
//! Tensors live on burn's CPU backend Flex, in f32 or bf16. They are read where they lie, and gradients are adopted
//! without a copy. Which backend and which implementation computes the loss is configuration; see `examples/embed.rs`.
//!
//! Legend: N tokens (rows), B sequences, T positions, H hidden size, V vocabulary.
#![forbid(unsafe_code)]

pub mod custom_op;
mod error;
mod grpo_loss;
mod input;
mod operand;
mod record;

pub use error::{Error, Result};
pub use grpo_loss::{GrpoLoss, Loss};
