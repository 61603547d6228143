//! The errors of this crate.

use grpo_files::counted;

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
    /// A value whose `${NAME}` cannot be replaced by a variable of the environment.
    #[error("configuration key `{key}`: {source}")]
    Reference {
        /// Dotted path of the key, such as `rewards.http.judge.headers.Authorization`.
        key: String,
        /// The error in the value.
        source: grpo_files::ExpandError,
    },
    /// A reward program that cannot be started.
    #[error("the reward program `{name}` (rewards.programs.{name}.command) cannot be started: {reason}")]
    Program {
        /// The name of the reward.
        name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A reward function that fails completion after completion.
    #[error(
        "the reward `{name}` has failed to judge {} in a row, which is rewards.max_consecutive_failures; the last failure: {last}",
        counted(*failures, "completion")
    )]
    TooManyFailures {
        /// The name of the reward.
        name: String,
        /// The number of completions in a row that it did not judge.
        failures: u64,
        /// What kept it from judging the last one.
        last: String,
    },
    /// A reward function that cannot judge the first completion that it is given.
    #[error("the reward `{name}` cannot judge a completion: {failure}")]
    Failed {
        /// The name of the reward.
        name: String,
        /// What keeps it from judging.
        failure: crate::RewardFailure,
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
