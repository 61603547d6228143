//! The errors of this crate.

use crate::files::DataReport;
use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the section `data` that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// Dotted path of the key in a run's configuration, such as `data.held_out_fraction`.
        key: String,
        /// The values that would be legal.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// Tasks that do not yield as many problems as were asked for.
    #[error(
        "only {found} of {wanted} {split} problems found after {attempts} draws: make the tasks larger or ask for fewer"
    )]
    TooFewProblems {
        /// The split: `training` or `held-out`.
        split: &'static str,
        /// The number of problems asked for.
        wanted: usize,
        /// The number of problems found.
        found: usize,
        /// The number of draws made.
        attempts: u64,
    },
    /// A file that cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Io {
        /// The path of the file that cannot be read.
        path: PathBuf,
        /// The reason of the failure.
        source: std::io::Error,
    },
    /// A file that cannot be used as a whole.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// The path of the file that cannot be used.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A row that is not what the configuration makes of it.
    #[error("{path}, line {line}: {reason}", path = path.display())]
    Row {
        /// The path of the data file that the row stands in.
        path: PathBuf,
        /// The line, from 1; of a Parquet file the row, from 1.
        line: u64,
        /// What was expected, and what is there.
        reason: String,
    },
    /// Files of which no row is left to train on.
    #[error("no row is left to train on: {}", report.to_string().replace("\n  ", "; ").replace('\n', "; "))]
    Empty {
        /// What became of the rows, file by file.
        report: DataReport,
    },
    /// Files with fewer held-out rows than were asked for.
    #[error("{}", too_few_rows(*wanted, *found))]
    TooFewRows {
        /// The number of rows asked for, at least 1.
        wanted: usize,
        /// The number of rows that there are.
        found: usize,
    },
    /// A data set of another crate that cannot deliver.
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

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
