//! The errors of this crate.

use crate::files::DataReport;
use std::path::PathBuf;

pub(crate) use grpo_files::check_key as check;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid value of the section `data`.
    #[error(transparent)]
    Config(#[from] grpo_files::KeyError),
    /// The tasks have fewer problems than requested.
    #[error(
        "only {found} of {wanted} {split} problems found after {attempts} draws: make the tasks larger or ask for fewer"
    )]
    TooFewProblems {
        /// The split: `training` or `held-out`.
        split: &'static str,
        /// The number of problems requested.
        wanted: usize,
        /// The number of problems found.
        found: usize,
        /// The number of draws made.
        attempts: u64,
    },
    /// A file cannot be read.
    #[error(transparent)]
    Io(#[from] grpo_files::Error),
    /// A file is unusable as a whole.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// The path of the file that cannot be used.
        path: PathBuf,
        /// The problem and its fix.
        reason: String,
    },
    /// A row does not match the configuration.
    #[error("{path}, line {line}: {reason}", path = path.display())]
    Row {
        /// The path of the row's file.
        path: PathBuf,
        /// The line, or the row of a Parquet file, from 1.
        line: u64,
        /// The expected and the found contents.
        reason: String,
    },
    /// The files have no row left to train on.
    #[error("no row is left to train on: {}", report.to_string().replace("\n  ", "; ").replace('\n', "; "))]
    Empty {
        /// The counts of rows by file.
        report: DataReport,
    },
    /// The files have fewer held-out rows than requested.
    #[error("{}", too_few_rows(*wanted, *found))]
    TooFewRows {
        /// The number of rows requested, at least 1.
        wanted: usize,
        /// The number of held-out rows.
        found: usize,
    },
    /// An error of another crate's data set.
    #[error("data set: {0}")]
    Dataset(#[source] Box<dyn std::error::Error + Send + Sync>),
}

fn too_few_rows(wanted: usize, found: usize) -> String {
    match found {
        0 => "evaluations need held-out rows, and none of the files' rows is held out: raise data.held_out_fraction, or name \
              data.eval_files"
            .into(),
        _ => format!(
            "{wanted} held-out rows are asked for and there {} {found}: ask for fewer (0 is all of them), raise \
             data.held_out_fraction, or name data.eval_files",
            if found == 1 { "is" } else { "are" }
        ),
    }
}
