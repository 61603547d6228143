//! Errors of the loss in candle models.

use candle_core::{DType, DeviceLocation};

/// Every error of this crate. Arguments are checked before anything is computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the loss library: an illegal configuration or batch, or an error of the backend.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A tensor whose shape does not fit the batch or the other tensors.
    #[error("{tensor}: expected shape {expected}, got {found:?}")]
    Shape {
        /// The name of the argument.
        tensor: &'static str,
        /// The expected shape, with the dimension letters of the documentation.
        expected: String,
        /// The given shape.
        found: Vec<usize>,
    },
    /// A tensor of a dtype that the loss does not support.
    #[error("{tensor} is {found:?}: expected {expected}; convert it with Tensor::to_dtype")]
    Dtype {
        /// The name of the argument.
        tensor: &'static str,
        /// The expected dtype.
        expected: &'static str,
        /// The given dtype.
        found: DType,
    },
    /// A tensor on a GPU. The loss never copies it silently.
    #[error(
        "{tensor} is on {device:?}, and the loss reads the host's memory: copy it with Tensor::to_device(&Device::Cpu)"
    )]
    NotOnCpu {
        /// The name of the argument.
        tensor: &'static str,
        /// The device of the tensor.
        device: DeviceLocation,
    },
    /// candle tracks no tensor passed to the loss, so there is nothing to differentiate.
    #[error(
        "no gradient to compute: candle tracks {tensors}; create trained tensors with Var, \
         or use score() for results without gradients"
    )]
    NotTracked {
        /// The arguments, as in "none of hidden, lm_head and bias".
        tensors: &'static str,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Lets `?` return errors of the loss in functions that return candle's.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}
