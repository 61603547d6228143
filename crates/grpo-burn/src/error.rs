//! What can go wrong between a burn model and the loss.

use burn::tensor::DType;

/// Every error of this crate. Nothing is checked by a panic inside burn that could be checked here first.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The loss library refused: an illegal configuration, a batch that does not fit, a backend that cannot.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A tensor whose shape does not fit the batch or the other tensors.
    #[error("{tensor}: expected shape {expected}, got {found:?}")]
    Shape {
        /// The argument.
        tensor: &'static str,
        /// What would have fit, with the dimension letters of the documentation.
        expected: String,
        /// What came.
        found: Vec<usize>,
    },
    /// A tensor of an element type that the loss does not take.
    #[error("{tensor} is {found:?}: expected {expected}; convert it with Tensor::cast")]
    Dtype {
        /// The argument.
        tensor: &'static str,
        /// What would have fit.
        expected: &'static str,
        /// What came.
        found: DType,
    },
    /// A tensor that lives on another backend than burn's CPU backend Flex.
    #[error("{tensor} does not live on burn's Flex backend: {reason}; move it with Tensor::to_device(&Device::flex())")]
    NotFlex {
        /// The argument.
        tensor: &'static str,
        /// burn's own words.
        reason: String,
    },
    /// No tensor given to the loss takes part in a graph, so that there is nothing to differentiate.
    #[error(
        "no gradient to make: autodiff tracks {tensors}; build the model on Device::flex().autodiff(), \
         mark what is to train with require_grad(), and use score() where no gradient is wanted"
    )]
    NotTracked {
        /// The arguments, as in "neither hidden nor lm_head".
        tensors: &'static str,
    },
    /// Tensors whose graphs were recorded under different gradient-checkpointing strategies; burn cannot join them.
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
