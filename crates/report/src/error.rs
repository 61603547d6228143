//! The errors of this crate.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A folder has no run.
    #[error("run folder {path}: {reason}", path = path.display())]
    NotARun {
        /// The folder as given.
        path: PathBuf,
        /// The missing files, and the fix.
        reason: String,
    },
    /// A log has no valid line.
    #[error("{path}: {reason}", path = path.display())]
    Rows {
        /// The path of the log, such as `RUN/metrics.jsonl`.
        path: PathBuf,
        /// The expected row, and the first line found.
        reason: String,
    },
    /// No run folder was given.
    #[error("a report needs at least one run folder")]
    NoRuns,
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
}
