//! What can go wrong with a report.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A folder that holds no run.
    #[error("run folder {path}: {reason}", path = path.display())]
    NotARun {
        /// The folder as it was named.
        path: PathBuf,
        /// What is missing and what to do.
        reason: String,
    },
    /// A file of a run without a single line that can be used.
    #[error("{path}: {reason}", path = path.display())]
    Rows {
        /// The path of the log, such as `RUN/metrics.jsonl`.
        path: PathBuf,
        /// What was expected, and what the first line is.
        reason: String,
    },
    /// No run was named.
    #[error("a report needs at least one run folder")]
    NoRuns,
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
}
