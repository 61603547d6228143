//! The errors of this crate.

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
    /// A data set of another crate that cannot deliver.
    #[error("data set: {0}")]
    Dataset(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
