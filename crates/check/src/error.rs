//! Errors of checks.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An illegal argument.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that refused it.
        operation: &'static str,
        /// The expected argument.
        expected: String,
        /// The given argument.
        found: String,
    },
    /// An illegal variant of a benchmark's problem.
    #[error("in variant `{name}` of {problem}")]
    Variant {
        /// The name of the variant.
        name: String,
        /// Name of the problem.
        problem: String,
        /// The error of the variant.
        #[source]
        source: Box<Error>,
    },
    /// An unusable file of expected logits, losses and gradients.
    #[error("{path}: {reason}", path = path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// The expected and the found content.
        reason: String,
    },
    /// An error of the policy under test.
    #[error(transparent)]
    Policy(Box<dyn std::error::Error + Send + Sync>),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// An error of the loss library.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// An unusable configuration or unusable inputs of a benchmark.
    #[error(transparent)]
    Bench(grpo_bench::Error),
}

impl Error {
    /// Creates an [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// Creates an [`Error::Policy`] from any error.
    pub fn policy(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Policy(error.into())
    }

    /// Creates an [`Error::Argument`] from printable values.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}

/// Errors of the loss library stay [`Error::Loss`], so that callers can recognise what a backend does not offer.
impl From<grpo_bench::Error> for Error {
    fn from(error: grpo_bench::Error) -> Self {
        match error {
            grpo_bench::Error::Loss(error) => Self::Loss(error),
            other => Self::Bench(other),
        }
    }
}
