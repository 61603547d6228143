//! Training: the loss of a micro-batch with the gradients of all parameters, and the optimizer, as programs of a device.
//!
//! [`TrainModules`] writes the programs: the forward pass over rows of whole sequences, several in a row where
//! they fit, the fused head of the loss on the hidden states that predict completion tokens, and reverse mode through the decoder, which
//! adds the gradients of all parameters to sums that stay on the device. Neither logits of all tokens nor hidden states on the host come to be.
//!
//! Legend: B rows, T tokens of a row, N completion tokens of all rows with padding, V vocabulary, H residual stream.

mod adamw;
mod loss;
mod modules;
mod packing;
mod rows;
mod step;

pub use modules::{TrainModules, TrainShape};

pub(crate) use adamw::{AdamW, Applied, Moments, Prepared, Scalars};
pub(crate) use loss::{Call, Device, Loss, Target};
pub(crate) use modules::default_tiling;
pub(crate) use rows::Rows;
pub(crate) use step::StepOfState;
