//! The errors of a configuration.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid value of a key.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Key {
        /// The dotted path of the key.
        key: String,
        /// The valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A file that cannot be read, or an invalid layer.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// An invalid section `loss`.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// An invalid section `wandb`.
    #[error(transparent)]
    Sink(#[from] grpo_sinks::Error),
    /// Invalid sampling options.
    #[error(transparent)]
    Policy(#[from] grpo_policy::Error),
    /// An invalid section `model`.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// An invalid section `data`.
    #[error(transparent)]
    Data(#[from] grpo_data::Error),
    /// An invalid section `rewards`.
    #[error(transparent)]
    Rewards(#[from] grpo_rewards::Error),
    /// An invalid section `environments`.
    #[error(transparent)]
    Environments(#[from] grpo_agents::Error),
}

impl Error {
    /// Returns an [`Error::Key`] from anything that prints.
    pub fn key(key: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        Self::Key { key: key.into(), expected: expected.into(), found: found.to_string() }
    }
}

/// Returns an [`Error::Key`] for `key` unless `ok`.
///
/// # Errors
/// [`Error::Key`].
pub fn check(ok: bool, key: &str, expected: &str, found: impl ToString) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::key(key, expected, found)) }
}
