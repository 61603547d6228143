//! The errors of servers.

use grpo_files::counted;
use std::path::PathBuf;

pub(crate) use grpo_files::check_key as check;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate. A server is named by its address without user, password and query.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid key of the section `rollout.server`.
    #[error(transparent)]
    Config(#[from] grpo_files::KeyError),
    /// A server does not answer, or refuses a request for now.
    #[error("{server}: {message} (after {}; rollout.server.retries allows more)", counted(*attempts, "attempt"))]
    Unavailable {
        /// The address of the server.
        server: String,
        /// The last failure.
        message: String,
        /// The number of attempts.
        attempts: u32,
    },
    /// A server was started with settings that do not fit the run.
    #[error("{server}: expected {expected}, got {found}; {fix}")]
    Settings {
        /// The address of the server.
        server: String,
        /// The required setting.
        expected: String,
        /// The setting found.
        found: String,
        /// The flag or variable to set.
        fix: String,
    },
    /// A server refused a request, or its reply is not valid.
    #[error("{server}: {message}")]
    Reply {
        /// The address of the server.
        server: String,
        /// The reason, with the expected state of the server.
        message: String,
    },
    /// A server has no valid weights, because an update of its weights failed.
    #[error(
        "{server}: the update of the weights failed, and the server stays paused because its weights may be incomplete: {message}; restart \
         the server, then resume the run"
    )]
    Weights {
        /// The address of the server.
        server: String,
        /// The failure.
        message: String,
    },
    /// The folder of the weights cannot be made.
    #[error("cannot make a folder for weights in {}: {source}", path.display())]
    Folder {
        /// The folder in which it should be made.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The engine was used in a way that it does not support.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that failed.
        operation: &'static str,
        /// The valid arguments.
        expected: String,
        /// The argument found.
        found: String,
    },
    /// An error of the model's files.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
}

impl From<Error> for grpo_policy::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}
