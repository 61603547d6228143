//! The errors of a run, with advice on how to fix them.

use grpo_files::counted;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid configuration.
    #[error(transparent)]
    Config(#[from] run_config::Error),
    /// Dynamic sampling found too few groups to learn from.
    #[error(
        "only {found} of {} {} kept by grpo.filter_groups (on `{metric}`) after {}: the tasks have become too easy for the policy, or are \
         too hard; end here, or resume the run with `--set grpo.filter_groups.max_num_gen_batches={more}`",
        counted(*wanted, "group of completions"), if *wanted == 1 { "was" } else { "were" }, counted(*batches, "generation batch"),
        more = batches.saturating_mul(2)
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
    /// An error of the loss library.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// An error of the policy or the rollout engine, or non-finite numbers.
    #[error(transparent)]
    Policy(#[from] policy::Error),
    /// An invalid model, or a text or token that the tokenizer cannot process.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An invalid section `data`, or a data set with too few problems.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// An invalid section `rewards`, or a reward function that fails.
    #[error(transparent)]
    Rewards(#[from] rewards::Error),
}

impl Error {
    /// Returns `true` if the error means that training diverged.
    pub fn is_divergence(&self) -> bool {
        match self {
            Self::Policy(policy::Error::NotFinite { .. }) | Self::TooManySkips { .. } => true,
            // Non-finite logits, found when sampling on a device.
            Self::Policy(policy::Error::Other(source)) => {
                matches!(source.downcast_ref(), Some(policy_pjrt::Error::NotFinite { .. }))
            }
            _ => false,
        }
    }

    /// Returns `true` if the policy or its device failed, as opposed to an invalid request: the device is lost or out of memory, or the
    /// policy's library returned an error.
    pub fn is_failure_of_policy(&self) -> bool {
        use grpo_core::Error::Backend;
        let Self::Policy(error) = self else { return matches!(self, Self::Loss(Backend { .. })) };
        matches!(error, policy::Error::Other(_) | policy::Error::Loss(Backend { .. }))
    }

    /// Returns an [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}
