//! The errors of a run, with advice on how to fix them.

use grpo_core::readable_bytes;
use grpo_files::counted;
use grpo_models::MemoryTable;
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
    /// The run does not fit into the memory of this machine.
    #[error(
        "{} of memory are needed and {} are free: {}:\n{table}",
        readable_bytes(table.total()), readable_bytes(*available), advice::HOST_MEMORY
    )]
    TooLarge {
        /// The memory by part.
        table: Box<MemoryTable>,
        /// The available memory in bytes.
        available: u64,
    },
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
    /// Servers that sample completions do not answer, or do not fit the run.
    #[error(transparent)]
    Engine(#[from] grpo_engines::Error),
    /// An invalid section `rewards`, or a reward function that fails.
    #[error(transparent)]
    Rewards(#[from] grpo_rewards::Error),
    /// An invalid section `environments`, or an environment that fails.
    #[error(transparent)]
    Environments(#[from] grpo_agents::Error),
}

impl From<grpo_policy::Error> for Error {
    fn from(error: grpo_policy::Error) -> Self {
        use grpo_policy_pjrt::Error::{OutOfMemory, TimedOut, TooLarge};
        let of_device = if let grpo_policy::Error::Other(error) = &error { error.downcast_ref() } else { None };
        let advice = match of_device {
            Some(TooLarge { .. }) => advice::DEVICE_MEMORY,
            Some(OutOfMemory { program, .. }) => advice::device_memory(program.as_deref()),
            Some(TimedOut { .. }) => advice::DEVICE_TIME,
            _ => return Self::Policy(error),
        };
        Self::Exhausted { error, advice }
    }
}

impl From<grpo_rollout::Error> for Error {
    fn from(error: grpo_rollout::Error) -> Self {
        match error {
            grpo_rollout::Error::Config(error) => Self::Config(error),
            grpo_rollout::Error::Model(error) => Self::Model(error),
            grpo_rollout::Error::Policy(error) => error.into(),
            grpo_rollout::Error::Environments(error) => Self::Environments(error),
            grpo_rollout::Error::Processes(error) => Self::Processes(error),
            grpo_rollout::Error::OtherCompletions { process } => Self::OtherCompletions { process },
            other => Self::Policy(grpo_policy::Error::other(other)),
        }
    }
}

impl From<grpo_planner::Error> for Error {
    fn from(error: grpo_planner::Error) -> Self {
        match error {
            grpo_planner::Error::Config(error) => Self::Config(error),
            grpo_planner::Error::Model(error) => Self::Model(error),
            other => Self::Policy(grpo_policy::Error::other(other)),
        }
    }
}

impl Error {
    /// Checks that the memory in `table` fits into the `available` bytes of this machine, if they are known.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub(crate) fn check_memory(table: &MemoryTable, available: Option<u64>) -> Result<()> {
        match available {
            Some(available) if table.total() > available => {
                Err(Self::TooLarge { table: Box::new(table.clone()), available })
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if the error means that training diverged.
    pub fn is_divergence(&self) -> bool {
        match self {
            Self::Policy(grpo_policy::Error::NotFinite { .. }) | Self::TooManySkips { .. } => true,
            // Non-finite logits, found when sampling on a device.
            Self::Policy(grpo_policy::Error::Other(source)) => {
                matches!(source.downcast_ref(), Some(grpo_policy_pjrt::Error::NotFinite { .. }))
            }
            _ => false,
        }
    }

    /// Returns `true` if the policy or its device failed, as opposed to an invalid request: the device is lost or out of memory, or the
    /// policy's library returned an error.
    pub fn is_failure_of_policy(&self) -> bool {
        use grpo_core::Error::Backend;
        match self {
            Self::Policy(error) => {
                matches!(error, grpo_policy::Error::Other(_) | grpo_policy::Error::Loss(Backend { .. }))
            }
            _ => matches!(self, Self::Exhausted { .. } | Self::Loss(Backend { .. })),
        }
    }

    /// Returns an [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_an_exhausted_device_name_the_keys_that_help() {
        let cause =
            || grpo_pjrt::Error::TimedOut { what: "a copy from the device", seconds: 3600.0, program: None }.into();
        let program = |name: &str| {
            let (operation, program) = (format!("running `{name}`"), Some(name.to_owned()));
            grpo_policy_pjrt::Error::OutOfMemory {
                operation,
                program,
                needed: Some(3 << 30),
                available: None,
                cause: cause(),
            }
        };
        let timed_out = grpo_policy_pjrt::Error::TimedOut { operation: "reading ids".into(), cause: cause() };
        for (error, words) in [
            (program("gradient"), ["running `gradient`", "3.22 GB needed", "grpo.gradient_accumulation_steps"]),
            (program("rollout_x"), ["running `rollout_x`", "3.22 GB needed", "rollout.batch_size"]),
            (timed_out, ["reading ids", "3600 seconds", "`policy.wait_limit_minutes`"]),
        ] {
            let error = Error::from(grpo_policy::Error::from(error));
            let text = error.to_string();
            assert!(error.is_failure_of_policy() && words.iter().all(|word| text.contains(word)), "{text}");
        }
        assert!(matches!(Error::from(grpo_policy::Error::from(grpo_policy_pjrt::Error::Lost)), Error::Policy(_)));
    }
}
