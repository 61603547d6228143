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
    /// A configuration value that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// Dotted path of the key.
        key: String,
        /// The values that would be legal.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// A variant of the configuration that cannot be used.
    #[error("in variant `{name}`")]
    Variant {
        /// The name of the variant.
        name: String,
        /// The error of the variant.
        #[source]
        source: Box<Error>,
    },
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
    /// A folder for logs that holds something already.
    #[error("run folder {path}: it is not empty: every benchmark has a log folder of its own", path = path.display())]
    LogFolder {
        /// The folder that is not empty.
        path: PathBuf,
    },
    /// A message that needs no fields.
    #[error("{0}")]
    Text(String),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// The loss library refused.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A sink of metrics cannot be opened.
    #[error(transparent)]
    Sink(#[from] grpo_sinks::Error),
}

impl Error {
    /// An [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// An [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}
