//! The errors of this crate.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a decoder on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request that does not fit the model, or whose parts do not fit each other.
    #[error(transparent)]
    Policy(#[from] policy::Error),
    /// A configuration or weights that do not fit, or a token that the model does not have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A loss that is not legal or does not fit its batch; a plugin that is not there, or opens no device.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A program that cannot be built: a defect of this crate.
    #[error("the program `{program}` cannot be built: {source}")]
    Program {
        /// The program.
        program: String,
        /// The illegal operation.
        source: stablehlo::Error,
    },
    /// The plugin refused or failed.
    #[error("{operation}: {source}")]
    Device {
        /// What was done: a program that was compiled or run, a tensor that was copied.
        operation: String,
        /// What the plugin reports.
        source: pjrt::Error,
    },
    /// A number type that has no program.
    #[error("{what} cannot have the number type {found}: expected {expected}")]
    Dtype {
        /// Weights, or arithmetic.
        what: &'static str,
        /// The number types that it can have.
        expected: &'static str,
        /// The number type that was asked for.
        found: stablehlo::Dtype,
    },
    /// The device has failed in the middle of an update, and has taken what it was updating with it.
    #[error("the device has failed during an update and lost the weights: continue the run from its last checkpoint")]
    Lost,
    /// Logits that are no longer finite.
    #[error(
        "logits of sample {sample} are not finite at token {token} of its completion: the weights or what they compute have \
         become NaN or infinite"
    )]
    NotFinite {
        /// The number of the sample within its request.
        sample: usize,
        /// The number of the token within the completion.
        token: usize,
    },
}

impl Error {
    /// An [`Error::Device`] of `operation`.
    pub(crate) fn device(operation: impl Into<String>) -> impl FnOnce(pjrt::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Device { operation, source }
    }
}

impl From<Error> for policy::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Policy(error) => error,
            Error::Model(error) => error.into(),
            Error::Loss(error) => error.into(),
            other => Self::other(other),
        }
    }
}
