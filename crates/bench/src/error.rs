//! Errors of benchmarks.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The benchmark was stopped on request.
    #[error("stopped before the end")]
    Stopped,
    /// An illegal configuration value.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// Dotted path of the key.
        key: String,
        /// The legal values.
        expected: String,
        /// The given value.
        found: String,
    },
    /// An unusable variant of the configuration.
    #[error("in variant `{name}`")]
    Variant {
        /// The name of the variant.
        name: String,
        /// The error of the variant.
        #[source]
        source: Box<Error>,
    },
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
    /// A folder for logs that is not empty.
    #[error("run folder {path} is not empty: use a new log folder for every benchmark", path = path.display())]
    LogFolder {
        /// The folder that is not empty.
        path: PathBuf,
    },
    /// Any other error.
    #[error("{0}")]
    Text(String),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// An error of the loss library.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A model folder that cannot be read.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// An error of the CPU policy.
    #[error(transparent)]
    Policy(#[from] grpo_policy::Error),
    /// A metrics sink that cannot be opened.
    #[error(transparent)]
    Sink(#[from] grpo_sinks::Error),
}

impl Error {
    /// Creates an [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// Creates an [`Error::Argument`] from printable values.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}
