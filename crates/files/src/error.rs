//! What can go wrong with files and layers of a configuration.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written.
    #[error("cannot {action} {path}", path = path.display())]
    Io {
        /// The action that was tried, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason of the failure.
        #[source]
        source: std::io::Error,
    },
    /// A file of rows that does not hold what it should.
    #[error("run folder {path}: {reason}", path = path.display())]
    Rows {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A layer of a configuration that cannot be used.
    #[error("in {origin}")]
    Layer {
        /// The file, environment variable or argument that the layer came from.
        origin: String,
        /// What is wrong with it.
        #[source]
        source: Box<Error>,
    },
    /// A key that a configuration does not have.
    #[error(transparent)]
    Key(#[from] grpo_core::Error),
    /// A message that needs no fields.
    #[error("{0}")]
    Text(String),
}

impl Error {
    /// An [`Error::Io`]: `action` is a verb with what belongs to it, such as `read` or `create the folder`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}
