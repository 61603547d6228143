//! Errors of policies and rollout engines.

/// `Result` of policies and rollout engines.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a policy or a rollout engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument does not fit the others.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that failed.
        operation: &'static str,
        /// The valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A sequence has more tokens than the model has positions.
    #[error("{what}: {length} tokens do not fit the model's max_position_embeddings of {limit}")]
    TooLong {
        /// The sequence, or the operation that created it.
        what: &'static str,
        /// The number of tokens of the sequence.
        length: usize,
        /// The largest number of tokens.
        limit: usize,
    },
    /// A list of saved tensors does not fit the state that is restored.
    #[error("cannot restore {what}: expected {expected}, got {found}")]
    State {
        /// The tensor or group of tensors.
        what: String,
        /// The valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// Token values were requested from a policy without a value head.
    #[error("this policy has no value head: PPO (grpo.advantages.estimator: gae) needs one that is trained with it")]
    NoValueHead,
    /// A number is not finite.
    #[error("not finite at optimizer step {step}: {what}; lower the learning rate or look at the rewards")]
    NotFinite {
        /// The loss, gradient, weights or moments; for a loss also the token, with its sequence and position.
        what: String,
        /// The optimizer step.
        step: u64,
    },
    /// The model configuration is invalid, or a token id is outside the vocabulary.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// An error of the loss library.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// The policy's device failed in a way that its user can answer.
    #[error("{source}")]
    Device {
        /// The kind of the failure.
        failure: DeviceFailure,
        /// The error of the implementation.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An error of a library that the implementation uses.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

/// A failure of a policy's device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceFailure {
    /// The policy needs more memory than the device has, found before anything was loaded.
    TooLarge,
    /// The memory is exhausted.
    OutOfMemory {
        /// The name of the program that needs it; `None` for a tensor.
        program: Option<String>,
    },
    /// The device did not finish within its time limit.
    TimedOut,
    /// The device computed numbers that are not finite.
    NotFinite,
}

impl Error {
    /// Returns an [`Error::Argument`] with both values formatted by `Display`.
    pub fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }

    /// Returns an [`Error::State`] with both values formatted by `Display`.
    pub fn state(what: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::State { what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// Wraps an error of an implementation as [`Error::Other`].
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }
}
