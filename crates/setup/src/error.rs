//! The errors of setting up a run.

use grpo_core::readable_bytes;
use grpo_models::MemoryTable;
use grpo_run_config::advice;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration, a file, or a part of the run that cannot be used.
    #[error(transparent)]
    Trainer(#[from] grpo_trainer::Error),
    /// Servers that sample completions do not answer, or do not fit the run.
    #[error(transparent)]
    Engine(#[from] grpo_engines::Error),
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
}

/// Converts the errors of parts to errors of the trainer, which has the same messages for them.
macro_rules! errors_of_parts {
    ($($error:ty),+ $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::Trainer(error.into())
            }
        }
    )+};
}

errors_of_parts!(
    grpo_agents::Error,
    grpo_core::Error,
    grpo_data::Error,
    grpo_models::Error,
    grpo_policy::Error,
    grpo_rewards::Error,
    grpo_conversations::Error,
    grpo_run_config::Error,
);

impl From<grpo_planner::Error> for Error {
    fn from(error: grpo_planner::Error) -> Self {
        match error {
            grpo_planner::Error::Config(error) => error.into(),
            grpo_planner::Error::Model(error) => error.into(),
            other => grpo_policy::Error::other(other).into(),
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

    /// Returns the error of an argument that does not fit, from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        grpo_policy::Error::argument(operation, expected, found).into()
    }
}

#[cfg(test)]
mod tests {
    use grpo_trainer::Error;

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
