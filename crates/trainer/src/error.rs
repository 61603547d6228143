//! The errors of a run, with advice on how to fix them.

use grpo_files::counted;
use grpo_policy::DeviceFailure;
use grpo_run_config::advice;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid configuration.
    #[error(transparent)]
    Config(#[from] grpo_run_config::Error),
    /// Dynamic sampling found too few groups to learn from.
    #[error(
        "only {found} of {} {} kept by grpo.filter_groups (on `{metric}`) after {}: the tasks have become too easy for the policy, or are \
         too hard, or grpo.filter_groups.max_num_gen_batches is too low",
        counted(*wanted, "group of completions"), if *wanted == 1 { "was" } else { "were" }, counted(*batches, "generation batch")
    )]
    TooFewGroups {
        /// The number of groups kept.
        found: usize,
        /// The number of groups of a step.
        wanted: usize,
        /// The number of generation batches sampled.
        batches: usize,
        /// The reward that the filter compares.
        metric: String,
    },
    /// An argument is inconsistent with others.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that failed.
        operation: &'static str,
        /// The valid arguments.
        expected: String,
        /// The argument found.
        found: String,
    },
    /// Too many updates in a row were skipped because their gradients were too large or not finite.
    #[error(
        "{} in a row {} skipped, which is max_consecutive_skips: the gradient norm, now {grad_norm}, stays above skip_grad_norm, {limit}, \
         or is not finite",
        counted(*skipped, "update"), if *skipped == 1 { "was" } else { "were" }
    )]
    TooManySkips {
        /// The number of updates skipped in a row.
        skipped: u64,
        /// The norm of the last gradient.
        grad_norm: f64,
        /// The largest norm that is not skipped.
        limit: f64,
    },
    /// This process has sampled other completions than process 0.
    #[error(
        "process {process} has sampled other completions than process 0: its device, its plugin or its build computes other numbers; use the \
         same in all processes"
    )]
    OtherCompletions {
        /// The number of this process.
        process: usize,
    },
    /// Another process of the run has ended, failed, or does something else.
    #[error(transparent)]
    Processes(#[from] grpo_distributed::Error),
    /// An error of the loss library.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// The memory or the time limit of the policy's device is exhausted.
    #[error("{error}: {advice}")]
    Exhausted {
        /// The device's error.
        #[source]
        error: grpo_policy::Error,
        /// The keys of the configuration that help.
        advice: &'static str,
    },
    /// An error of the policy or the rollout engine, or non-finite numbers.
    #[error(transparent)]
    Policy(grpo_policy::Error),
    /// An invalid model, or a text or token that the tokenizer cannot process.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// An invalid section `data`, or a data set with too few problems.
    #[error(transparent)]
    Data(#[from] grpo_data::Error),
    /// An invalid section `rewards`, or a reward function that fails.
    #[error(transparent)]
    Rewards(#[from] grpo_rewards::Error),
    /// An invalid section `environments`, or an environment that fails.
    #[error(transparent)]
    Environments(#[from] grpo_agents::Error),
}

impl From<grpo_policy::Error> for Error {
    fn from(error: grpo_policy::Error) -> Self {
        let advice = match &error {
            grpo_policy::Error::Device { failure, .. } => match failure {
                DeviceFailure::TooLarge => advice::DEVICE_MEMORY,
                DeviceFailure::OutOfMemory { program } => advice::device_memory(program.as_deref()),
                DeviceFailure::TimedOut => advice::DEVICE_TIME,
                _ => return Self::Policy(error),
            },
            _ => return Self::Policy(error),
        };
        Self::Exhausted { error, advice }
    }
}

impl From<grpo_conversations::Error> for Error {
    fn from(error: grpo_conversations::Error) -> Self {
        match error {
            grpo_conversations::Error::Config(error) => Self::Config(error),
            grpo_conversations::Error::Model(error) => Self::Model(error),
            grpo_conversations::Error::Policy(error) => error.into(),
            grpo_conversations::Error::Environments(error) => Self::Environments(error),
            grpo_conversations::Error::Processes(error) => Self::Processes(error),
            grpo_conversations::Error::OtherCompletions { process } => Self::OtherCompletions { process },
            other => Self::Policy(grpo_policy::Error::other(other)),
        }
    }
}

impl Error {
    /// Returns `true` if the error means that training diverged.
    pub fn is_divergence(&self) -> bool {
        use grpo_policy::Error::{Device, NotFinite};
        matches!(
            self,
            Self::Policy(NotFinite { .. } | Device { failure: DeviceFailure::NotFinite, .. })
                | Self::TooManySkips { .. }
        )
    }

    /// Returns `true` if the policy or its device failed, as opposed to an invalid request: the device is lost or out of memory, or the
    /// policy's library returned an error.
    pub fn is_failure_of_policy(&self) -> bool {
        use grpo_core::Error::Backend;
        use grpo_policy::Error::{Device, Loss, Other};
        match self {
            Self::Policy(error) => matches!(error, Other(_) | Device { .. } | Loss(Backend { .. })),
            _ => matches!(self, Self::Exhausted { .. } | Self::Loss(Backend { .. })),
        }
    }

    /// Returns an [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}
