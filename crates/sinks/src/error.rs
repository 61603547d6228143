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
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        reason: std::io::Error,
    },
    /// A file without the content that its name implies.
    #[error("{path}: {reason}; move it elsewhere", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// An invalid value of `WANDB_MODE`.
    #[error("WANDB_MODE: expected online, offline or disabled, got `{0}`")]
    Mode(String),
    /// An illegal value in the section `wandb`.
    #[error(transparent)]
    Config(#[from] grpo_files::KeyError),
    /// A configuration that cannot be serialised for a sink.
    #[error("configuration: {0}")]
    Unwritable(String),
    /// A run that was not uploaded.
    #[error("not uploaded to Weights & Biases: {reason}; nothing is lost, upload it with: {command}")]
    NotUploaded {
        /// The missing requirement or the failure.
        reason: String,
        /// The command that uploads the run later.
        command: String,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |reason| Self::Io { action, path, reason }
    }
}
