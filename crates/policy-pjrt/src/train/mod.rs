//! Training: gradients of the loss and the optimizer, as programs of a device.
//!
//! [`TrainPrograms`] builds the programs: the forward pass over rows of packed sequences, the fused loss head on the hidden states that
//! predict completion tokens, and the backward pass through the decoder, which adds the gradients of all parameters to accumulators on the
//! device. Logits of all tokens are never materialised, and hidden states never leave the device.
//!
//! Legend: B rows, T tokens of a row, N completion tokens of all rows with padding, V vocabulary, H hidden size.

mod loss;
mod memory;
mod optimizer;
mod packing;
mod programs;
mod rows;
mod saved;
mod step;

pub use programs::{TrainPrograms, TrainShape};
pub use saved::{saved_bytes, saved_on_device};

pub(crate) use loss::{Device, Loss, LossHead, OtherOutputs, Target, UploadedRows};
pub(crate) use optimizer::{Applied, Moments, Optimizer, Scalars};
pub(crate) use programs::default_tiling;
pub(crate) use rows::Rows;
pub(crate) use step::StepOfState;
