//! Errors of the loss in burn models.

use burn::tensor::DType;

/// Every error of this crate. Arguments are checked here before burn could panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the loss library: an illegal configuration or batch, or an error of the backend.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A tensor whose shape does not fit the batch or the other tensors.
    #[error("{tensor}: expected shape {expected}, got {found:?}")]
    Shape {
        /// The argument.
        tensor: &'static str,
        /// The expected shape, with the dimension letters of the documentation.
        expected: String,
        /// The given shape.
        found: Vec<usize>,
    },
    /// A tensor of a dtype that the loss does not support.
    #[error("{tensor} is {found:?}: expected {expected}; convert it with Tensor::cast")]
    Dtype {
        /// The argument.
        tensor: &'static str,
        /// The expected dtype.
        expected: &'static str,
        /// The given dtype.
        found: DType,
    },
    /// A tensor on another backend than burn's CPU backend Flex.
    #[error("{tensor} does not live on burn's Flex backend: {reason}; move it with Tensor::to_device(&Device::flex())")]
    NotFlex {
        /// The argument.
        tensor: &'static str,
        /// burn's error message.
        reason: String,
    },
    /// No tensor passed to the loss is tracked by autodiff, so there is nothing to differentiate.
    #[error(
        "no gradient to compute: autodiff tracks {tensors}; build the model on Device::flex().autodiff(), \
         mark trained tensors with require_grad(), or use score() for results without gradients"
    )]
    NotTracked {
        /// The arguments, as in "neither hidden nor lm_head".
        tensors: &'static str,
    },
    /// Tensors whose graphs use different gradient-checkpointing strategies; burn cannot join them.
    #[error("{tensor} and the tensors before it use different gradient-checkpointing strategies")]
    Checkpointing {
        /// The first argument that differs.
        tensor: &'static str,
    },
    /// Storage that cannot be read as a slice of elements.
    #[error("the storage of {tensor} is not aligned for its element type; rebuild the tensor from TensorData")]
    Storage {
        /// The argument.
        tensor: &'static str,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
