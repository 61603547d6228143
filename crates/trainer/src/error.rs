//! The errors of a run, in words that say what to do.

use grpo_core::readable_bytes;
use grpo_files::counted;
use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration value that is not legal.
    #[error("configuration key `{key}`: expected {expected}, got {found}")]
    Config {
        /// The dotted path of the key.
        key: String,
        /// The values that would be legal.
        expected: String,
        /// The value that was given.
        found: String,
    },
    /// Dynamic sampling that does not find enough groups to learn from.
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
        /// The reward that the filter looked at.
        metric: String,
    },
    /// A program of a run that does not fit into the memory of the device.
    #[error(
        "the program `{program}` with what is beside it needs {}, and the device has {}: {}",
        readable_bytes(*needed), readable_bytes(*there), crate::programs::KNOBS
    )]
    DoesNotFit {
        /// The program during which most is on the device.
        program: String,
        /// What has to be there at the same time, in bytes.
        needed: u64,
        /// The memory of the device in bytes.
        there: u64,
    },
    /// An argument that does not fit the others.
    #[error("{operation}: expected {expected}, got {found}")]
    Argument {
        /// The operation that refused.
        operation: &'static str,
        /// What would fit.
        expected: String,
        /// What came.
        found: String,
    },
    /// Gradients that are too large, or not finite, update after update.
    #[error(
        "{} in a row {} skipped, which is max_consecutive_skips: the gradient norm, now {grad_norm}, stays above skip_grad_norm, {limit}, \
         or is not finite",
        counted(*skipped, "update"), if *skipped == 1 { "was" } else { "were" }
    )]
    TooManySkips {
        /// The number of updates skipped one after the other.
        skipped: u64,
        /// The norm of the last gradient.
        grad_norm: f64,
        /// The largest norm that is applied.
        limit: f64,
    },
    /// A reward function that has failed too often in a row.
    #[error(
        "{cause}; the run is saved as it was before this step, in {}: mend the reward, and continue with `grpo train --resume {}`",
        checkpoint.display(), run.display()
    )]
    RewardsFailed {
        /// The function and its last failure.
        cause: Box<rewards::Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The folder of the checkpoint.
        checkpoint: PathBuf,
    },
    /// A run that can go on only from before it diverged.
    #[error("{cause}; {}", way_back(run, last_finite.as_deref(), section, *learning_rate))]
    Diverged {
        /// The error that was found.
        cause: Box<Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The name of the last checkpoint, whose weights and moments are finite; `None` when there is none.
        last_finite: Option<String>,
        /// The section of the optimizer that was at work.
        section: &'static str,
        /// The learning rate of that section.
        learning_rate: f64,
    },
    /// A run whose policy failed, or the device that computes for it, and which goes on from its last checkpoint.
    #[error("{cause}; {}", way_on(run, last_good.as_deref()))]
    PolicyFailed {
        /// The error of the policy.
        cause: Box<Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The name of the last checkpoint; `None` when there is none.
        last_good: Option<String>,
    },
    /// A run folder that is no longer where it was.
    #[error(
        "run folder {path}: it was moved, deleted or replaced, or a log in it was, while the run was writing to it; the run ends \
         here and writes nothing more; {}",
        moved_hint(last_good.as_deref()),
        path = path.display()
    )]
    Moved {
        /// The place where the folder was.
        path: PathBuf,
        /// The place where the last checkpoint was written.
        last_good: Option<PathBuf>,
    },
    /// A message that needs no fields.
    #[error("{0}")]
    Text(String),
    /// A file that cannot be read or written, or a layer of a configuration that cannot be used.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// A run folder that does not fit what is asked for.
    #[error("run folder {path}: {reason}", path = path.display())]
    RunDir {
        /// The folder, or a file in it.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A checkpoint that cannot be restored.
    #[error("damaged checkpoint: {path}: {reason}{}", last_good_hint(last_good), path = path.display())]
    Checkpoint {
        /// The file that is wrong.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// The name of the newest checkpoint that is whole; `None` when nobody has looked.
        last_good: Option<LastGood>,
    },
    /// The loss library refused.
    #[error(transparent)]
    Loss(#[from] grpo_core::Error),
    /// A sink of metrics cannot be opened.
    #[error(transparent)]
    Sink(#[from] grpo_sinks::Error),
    /// The policy or the rollout engine refused, or its numbers are no longer finite.
    #[error(transparent)]
    Policy(#[from] policy::Error),
    /// The model's configuration is not legal, or the tokenizer refused a text or a token.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The section `data` is not legal, or the data set has too few problems.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// The section `rewards` is not legal, or a reward function does not work.
    #[error(transparent)]
    Rewards(#[from] rewards::Error),
}

/// What is left beside a damaged checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LastGood {
    /// The newest checkpoint that is whole.
    Checkpoint(String),
    /// No other checkpoint is whole.
    None,
}

fn last_good_hint(last_good: &Option<LastGood>) -> String {
    match last_good {
        None => String::new(),
        Some(LastGood::Checkpoint(name)) => {
            format!("; the last good checkpoint is {name}: add `--from {name}` to continue from it")
        }
        Some(LastGood::None) => {
            "; no other checkpoint of this run is whole: start a new run from its config.yaml".into()
        }
    }
}

fn way_back(run: &Path, last_finite: Option<&str>, section: &str, learning_rate: f64) -> String {
    let change = format!("--set {section}.learning_rate={:e}", learning_rate / 2.0);
    let guards = format!("{section}.max_grad_norm clips gradients, {section}.skip_grad_norm skips updates");
    let run = run.display();
    match last_finite {
        Some(name) => format!(
            "the last finite checkpoint is {name}: continue from it with a lower learning rate, `grpo train --resume {run} \
             --from {name} {change}`; {guards}"
        ),
        None => format!("no checkpoint was saved before: start again with a lower learning rate, `{change}`; {guards}"),
    }
}

fn way_on(run: &Path, last_good: Option<&str>) -> String {
    let run = run.display();
    let policy = "keys of the section policy may change there, as in `--set policy.wait_limit_minutes=120`";
    match last_good {
        Some(name) => format!(
            "the run folder {run} is intact, and its last good checkpoint is {name}: when the cause is mended, continue from it with \
             `grpo train --resume {run} --from {name}`; {policy}"
        ),
        None => format!(
            "the run folder {run} is intact and has no checkpoint yet: when the cause is mended, begin the run again with \
             `grpo train --resume {run}`; {policy}"
        ),
    }
}

fn moved_hint(last_good: Option<&Path>) -> String {
    match last_good {
        Some(path) => format!(
            "its last good checkpoint was written to {}: move the folder back, or name its new place, and continue with \
             `grpo train --resume FOLDER`",
            path.display()
        ),
        None => "no checkpoint had been saved".to_owned(),
    }
}

impl Error {
    /// An [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// A [`policy::Error::State`] from anything that prints.
    pub(crate) fn state(what: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        policy::Error::state(what, expected, found).into()
    }

    /// A [`policy::Error::NotFinite`].
    pub(crate) fn not_finite(what: impl Into<String>, step: u64) -> Self {
        policy::Error::NotFinite { what: what.into(), step }.into()
    }

    /// An [`Error::Argument`] from anything that prints.
    pub(crate) fn argument(operation: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { operation, expected: expected.to_string(), found: found.to_string() }
    }
}
