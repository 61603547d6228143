//! The errors of this crate.

use grpo_files::counted;

pub(crate) use grpo_files::check_key as check;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid value in the section `environments`.
    #[error(transparent)]
    Config(#[from] grpo_files::KeyError),
    /// A program that cannot be started, or a reference to a missing environment variable.
    #[error(transparent)]
    Program(#[from] grpo_rewards::Error),
    /// An address at which no endpoint can be opened.
    #[error(
        "`rollout.endpoint`: cannot listen on {address}: {source}; choose another port, or leave the key out for a free one, if another run has \
         it"
    )]
    Endpoint {
        /// The address.
        address: std::net::SocketAddr,
        /// The error of the system.
        source: std::io::Error,
    },
    /// Agents without an endpoint.
    #[error("agents need an endpoint, which a run opens at `rollout.endpoint`")]
    NoEndpoint,
    /// The operating system has no random numbers for the keys of agents.
    #[error("the keys of agents need random numbers of the operating system: {reason}")]
    Random {
        /// The error of the system.
        reason: String,
    },
    /// An environment that cannot start a conversation, before the run.
    #[error("the environment `{name}` cannot start a conversation: {failure}")]
    Failed {
        /// The name of the environment.
        name: String,
        /// The reason.
        failure: crate::Failure,
    },
    /// An environment that has failed in every conversation that asked it since the start of the run.
    #[error(
        "the environment `{name}` has failed in every conversation so far that asked it ({failures}); the cause: {cause}"
    )]
    NeverAnswered {
        /// The name of the environment.
        name: String,
        /// The number of conversations in which it failed.
        failures: u64,
        /// The last cause.
        cause: String,
    },
    /// An environment that failed in too many consecutive conversations.
    #[error(
        "the environment `{name}` has failed in {} in a row, which is rollout.multi_turn.max_consecutive_failures; the last cause: {last}",
        counted(*failures, "conversation")
    )]
    TooManyFailures {
        /// The name of the environment.
        name: String,
        /// The number of consecutive conversations in which it failed.
        failures: u64,
        /// The last cause.
        last: String,
    },
}
