//! The errors of this crate.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the section `rewards` that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// Dotted path of the key in a run's configuration, such as `rewards.correct`.
        key: String,
        /// The values that would be legal.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// Settings of the penalty for length that the loss library refuses.
    #[error(transparent)]
    Overlong(#[from] grpo_core::Error),
}

/// An [`Error::Config`] for `key` unless `ok`.
pub(crate) fn check(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
}
