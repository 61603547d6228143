//! The errors of this crate.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("cannot {action} {path}", path = path.display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A log does not have the expected rows.
    #[error("run folder {path}: {reason}", path = path.display())]
    Rows {
        /// The file.
        path: PathBuf,
        /// The problem and its fix.
        reason: String,
    },
    /// A layer of a configuration is invalid.
    #[error("in {origin}")]
    Layer {
        /// The file, environment variable or argument of the layer.
        origin: String,
        /// The problem.
        #[source]
        source: Box<Error>,
    },
    /// A configuration has no such key.
    #[error(transparent)]
    Key(#[from] grpo_core::Error),
    /// A message that needs no fields.
    #[error("{0}")]
    Text(String),
}

impl Error {
    /// Returns an [`Error::Io`]: `action` is a verb phrase such as `read` or `create the folder`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

/// An invalid value of a configuration key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("configuration key `{key}`: expected {expected}, got {found}")]
pub struct KeyError {
    /// The dotted path of the key in a run's configuration, such as `data.held_out_fraction`.
    pub key: String,
    /// The valid values.
    pub expected: String,
    /// The value found.
    pub found: String,
}

/// Checks the value of a configuration key.
///
/// # Errors
/// [`KeyError`] unless `ok`.
pub fn check_key(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<(), KeyError> {
    if ok {
        return Ok(());
    }
    Err(KeyError { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
