//! The errors of this crate.

use grpo_files::counted;

pub(crate) use grpo_files::check_key as check;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid value in the section `rewards`.
    #[error(transparent)]
    Config(#[from] grpo_files::KeyError),
    /// A value with a reference `${NAME}` to a variable that cannot be resolved.
    #[error("configuration key `{key}`: {source}")]
    Reference {
        /// The dotted path of the key, such as `rewards.http.judge.headers.Authorization`.
        key: String,
        /// The error of the reference.
        source: grpo_files::ExpandError,
    },
    /// A program that cannot be started.
    #[error("the program of `{key}` cannot be started: {reason}")]
    Program {
        /// The dotted path of the key, such as `rewards.programs.judge.command`.
        key: String,
        /// The reason, and the fix.
        reason: String,
    },
    /// A reward function that failed for too many consecutive completions.
    #[error(
        "the reward `{name}` has failed to judge {} in a row, which is rewards.max_consecutive_failures; the last failure: {last}",
        counted(*failures, "completion")
    )]
    TooManyFailures {
        /// The name of the reward.
        name: String,
        /// The number of consecutive completions that it failed to score.
        failures: u64,
        /// The error for the last completion.
        last: String,
    },
    /// A reward function that failed to score every completion of the first step.
    #[error(
        "the reward `{name}` has failed to judge every completion of the first step ({failures} of {failures}); the last failure: {last}"
    )]
    FailedFirstStep {
        /// The name of the reward.
        name: String,
        /// The number of completions that it failed to score.
        failures: usize,
        /// The error for the last completion.
        last: String,
    },
    /// A reward function that failed to score the first completion, before the run.
    #[error("the reward `{name}` cannot judge a completion: {failure}")]
    Failed {
        /// The name of the reward.
        name: String,
        /// The error.
        failure: crate::RewardFailure,
    },
    /// Invalid settings of the length penalty.
    #[error(transparent)]
    Overlong(#[from] grpo_core::Error),
}
