//! The errors of a run in its folder, with advice on how to continue.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A reward function or an environment failed too often in a row.
    #[error(
        "{cause}; the run is saved as it was before this step, in {}: fix it, and continue with `grpo train --resume {}`",
        checkpoint.display(), run.display()
    )]
    RewardsFailed {
        /// The function or the environment, and its last failure.
        #[source]
        cause: Box<grpo_trainer::Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The folder of the checkpoint.
        checkpoint: PathBuf,
    },
    /// Dynamic sampling found too few groups to learn from.
    #[error(
        "{cause}; the run is saved as it was before this step: end here, or continue with `grpo train --resume {} --set \
         grpo.filter_groups.max_num_gen_batches={more}`",
        run.display()
    )]
    TooFewGroups {
        /// The numbers of groups.
        #[source]
        cause: Box<grpo_trainer::Error>,
        /// The folder of the run.
        run: PathBuf,
        /// A higher limit of generation batches.
        more: usize,
    },
    /// The run diverged and can only continue from an earlier checkpoint.
    #[error("{cause}; {}", way_back(run, last_finite.as_deref(), section, *learning_rate))]
    Diverged {
        /// The original error.
        #[source]
        cause: Box<grpo_trainer::Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The name of the last checkpoint, whose weights and moments are finite; `None` if there is none.
        last_finite: Option<String>,
        /// The section of the active optimizer.
        section: &'static str,
        /// The learning rate of that section.
        learning_rate: f64,
    },
    /// The policy, its device or another process of the run failed; the run can continue from its last checkpoint.
    #[error("{cause}; {}", way_on(run, last_good.as_deref()))]
    PolicyFailed {
        /// The error of the policy or of the connection to the process.
        #[source]
        cause: Box<grpo_trainer::Error>,
        /// The folder of the run.
        run: PathBuf,
        /// The name of the last checkpoint; `None` if there is none.
        last_good: Option<String>,
    },
    /// The run folder is no longer in its place.
    #[error(
        "run folder {path}: it was moved, deleted or replaced, or a log in it was, while the run was writing to it; the run ends \
         here and writes nothing more; {}",
        moved_hint(last_good.as_deref()),
        path = path.display()
    )]
    Moved {
        /// The original path of the folder.
        path: PathBuf,
        /// The original path of the last checkpoint.
        last_good: Option<PathBuf>,
    },
    /// A run folder cannot be used as requested.
    #[error("run folder {path}: {reason}", path = path.display())]
    RunDir {
        /// The folder, or a file in it.
        path: PathBuf,
        /// The problem and its fix.
        reason: String,
    },
    /// A checkpoint cannot be restored.
    #[error("damaged checkpoint: {path}: {reason}{advice}", path = path.display())]
    Checkpoint {
        /// The damaged file.
        path: PathBuf,
        /// The damage.
        reason: String,
        /// The newest valid checkpoint and how to continue; empty if it was not searched.
        advice: String,
    },
    /// A message that needs no fields.
    #[error("{0}")]
    Text(String),
    /// A file cannot be read or written, or a layer of a configuration is invalid.
    #[error(transparent)]
    File(#[from] grpo_files::Error),
    /// An invalid configuration.
    #[error(transparent)]
    Config(#[from] grpo_run_config::Error),
    /// An invalid model, or a model folder that cannot be written.
    #[error(transparent)]
    Model(#[from] grpo_models::Error),
    /// A sink of metrics cannot be opened.
    #[error(transparent)]
    Sink(#[from] grpo_sinks::Error),
    /// An error of the trainer or its policy.
    #[error(transparent)]
    Trainer(#[from] grpo_trainer::Error),
    /// A run that does not fit into memory, or servers that do not answer.
    #[error(transparent)]
    Setup(Box<grpo_setup::Error>),
}

impl From<grpo_setup::Error> for Error {
    fn from(error: grpo_setup::Error) -> Self {
        match error {
            grpo_setup::Error::Trainer(error) => Self::Trainer(error),
            other => Self::Setup(Box::new(other)),
        }
    }
}

impl From<grpo_policy::Error> for Error {
    fn from(error: grpo_policy::Error) -> Self {
        Self::Trainer(error.into())
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
            "the run folder {run} is intact, and its last good checkpoint is {name}: when the cause is fixed, continue from it with \
             `grpo train --resume {run} --from {name}`; {policy}"
        ),
        None => format!(
            "the run folder {run} is intact and has no checkpoint yet: when the cause is fixed, start the run over with \
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
    /// Returns an [`Error::File`] about `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File(grpo_files::Error::io(action, path, source))
    }

    /// Returns an [`Error::RunDir`] about `path`.
    pub(crate) fn run_dir(path: &Path, reason: impl Into<String>) -> Self {
        Self::RunDir { path: path.to_owned(), reason: reason.into() }
    }
}
