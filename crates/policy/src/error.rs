//! The errors of policies and rollout engines.

/// Result of policies and rollout engines.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of a policy or a rollout engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that does not fit the others.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that refused.
        operation: &'static str,
        /// What would fit.
        expected: String,
        /// What came.
        found: String,
    },
    /// A sequence that is longer than the model has positions for.
    #[error("{what}: {length} tokens do not fit the model's max_position_embeddings of {limit}")]
    TooLong {
        /// The sequence, or the operation that made it.
        what: &'static str,
        /// The number of its tokens.
        length: usize,
        /// The number of tokens that fit.
        limit: usize,
    },
    /// A list of saved tensors that does not fit what is being restored.
    #[error("cannot restore {what}: expected {expected}, got {found}")]
    State {
        /// The tensor or the group of tensors.
        what: String,
        /// What would fit.
        expected: String,
        /// What came.
        found: String,
    },
    /// Values of tokens are asked for where nothing makes them.
    #[error("this policy has no value head: PPO (grpo.advantages.estimator: gae) needs one that is trained with it")]
    NoValueHead,
    /// Numbers that are no longer finite.
    #[error("not finite at optimizer step {step}: {what}; lower the learning rate or look at the rewards")]
    NotFinite {
        /// Loss, gradient, weights or moments; of a loss the token, with its sequence and position.
        what: String,
        /// The optimizer step.
        step: u64,
    },
    /// The model's configuration, or a token id that it does not have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The loss library refused.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// An error of the library that an implementation is made with.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An [`Error::Argument`] from anything that prints.
    pub fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }

    /// An [`Error::State`] from anything that prints.
    pub fn state(what: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self::State { what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// An [`Error::Other`] from an error of an implementation's own.
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }
}
