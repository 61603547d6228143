//! The errors of this crate.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder that cannot be read or written.
    #[error("cannot {action} {path}: {reason}", path = path.display())]
    Io {
        /// The action that was tried, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason of the failure.
        reason: std::io::Error,
    },
    /// A file that is not what its name says.
    #[error("{path}: {reason}; move it elsewhere", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// `WANDB_MODE` with a value that is none of its own.
    #[error("WANDB_MODE: expected online, offline or disabled, got `{0}`")]
    Mode(String),
    /// A value of the section `wandb` that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// The dotted path of the key.
        key: &'static str,
        /// The values that would be legal.
        expected: &'static str,
        /// The value that was given.
        found: String,
    },
    /// A configuration that cannot be handed to a sink.
    #[error("configuration: {0}")]
    Unwritable(String),
    /// A run that stays on this machine.
    #[error("not uploaded to Weights & Biases: {reason}; nothing is lost, upload it with: {command}")]
    NotUploaded {
        /// What is missing or went wrong.
        reason: String,
        /// The command that uploads the run later.
        command: String,
    },
}

impl Error {
    /// An [`Error::Io`].
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |reason| Self::Io { action, path, reason }
    }
}
