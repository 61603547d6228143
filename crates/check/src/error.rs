//! Errors of checks.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that does not fit the others.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that refused.
        operation: &'static str,
        /// The arguments that would fit.
        expected: String,
        /// The argument that was given.
        found: String,
    },
    /// A variant of a benchmark's problem that cannot be checked.
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
    /// A file of expected logits, losses and gradients that cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// What was expected, and what it has.
        reason: String,
    },
    /// A policy that cannot compute what a file asks for.
    #[error(transparent)]
    Policy(Box<dyn std::error::Error + Send + Sync>),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// The loss library refused.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A benchmark's configuration or its inputs cannot be used.
    #[error(transparent)]
    Bench(grpo_bench::Error),
}

impl Error {
    /// An [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// An [`Error::Policy`] from any error.
    pub fn policy(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Policy(error.into())
    }

    /// An [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}

/// What the loss library refused stays [`Error::Loss`], so that what a backend does not offer can be told apart.
impl From<grpo_bench::Error> for Error {
    fn from(error: grpo_bench::Error) -> Self {
        match error {
            grpo_bench::Error::Loss(error) => Self::Loss(error),
            other => Self::Bench(other),
        }
    }
}
