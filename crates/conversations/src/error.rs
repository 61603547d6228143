//! The errors of rollouts.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parser of tool calls that does not fit the chat template.
    #[error(transparent)]
    Config(#[from] grpo_run_config::Error),
    /// A text or token that the tokenizer cannot process, or a chat template that cannot be used for conversations.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// An error of the policy or the engine.
    #[error(transparent)]
    Policy(#[from] grpo_policy::Error),
    /// An environment that cannot start a conversation, or agents without an endpoint.
    #[error(transparent)]
    Environments(#[from] grpo_agents::Error),
    /// Another process of the run has ended, failed, or does something else.
    #[error(transparent)]
    Processes(#[from] grpo_distributed::Error),
    /// This process has sampled other completions than process 0.
    #[error(
        "process {process} has sampled other completions than process 0: its device, its plugin or its build computes other numbers; use the \
         same in all processes"
    )]
    OtherCompletions {
        /// The number of this process.
        process: usize,
    },
    /// The engine returned other completions than it was asked for.
    #[error("rollout: expected {expected}, got {found}")]
    Completions {
        /// The completions of the request.
        expected: String,
        /// The completions returned.
        found: String,
    },
}
