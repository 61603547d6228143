//! Errors that end a run early, with advice on how to continue.

use super::Run;
use crate::dir::write_json;
use crate::error::{Error, Result};
use grpo_trainer::Phase;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;

/// The content of failure.json, which a run leaves when an error ends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The error with its causes.
    pub error: String,
    /// The name of the last completed position, such as `step-000012`.
    pub position: String,
}

/// Formats an error with its causes on one line. Many errors name their cause themselves; it is then not repeated.
///
/// ```
/// let missing = std::io::Error::new(std::io::ErrorKind::NotFound, "no such file");
/// let error = grpo_files::Error::io("read", "run.yaml".as_ref(), missing);
/// assert_eq!(grpo_run::failure::with_causes(&error), "cannot read run.yaml: no such file");
/// ```
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

impl Run {
    /// Adds advice on how to continue to an error that ends the run.
    pub(super) fn explain(&self, error: Error) -> Error {
        if !matches!(error, Error::Moved { .. }) && !self.is_in_place() {
            return self.moved();
        }
        let Error::Trainer(cause) = error else { return error };
        let diverged = cause.is_divergence();
        let is_process_failure = matches!(cause, grpo_trainer::Error::Processes(_));
        if !diverged && !cause.is_failure_of_policy() && !is_process_failure {
            return cause.into();
        }
        // The curves help to find the cause; a failure to draw them must not hide the error.
        let _ = self.draw_curves();
        let (cause, run) = (Box::new(cause), self.dir.root().to_owned());
        let last_saved = self.saved.map(|position| position.to_string());
        if !diverged {
            return Error::PolicyFailed { cause, run, last_good: last_saved };
        }
        let config = self.trainer.config();
        let (section, optimizer) = match self.trainer.phase() {
            Phase::Warmup => ("warmup.optimizer", &config.warmup.optimizer),
            _ => ("optimizer", &config.optimizer),
        };
        Error::Diverged { cause, run, last_finite: last_saved, section, learning_rate: optimizer.learning_rate }
    }

    /// Writes failure.json.
    pub(super) fn remember_failure(&self, error: &Error) {
        if !self.is_in_place() {
            return;
        }
        let failure = Failure { error: with_causes(error), position: self.position.to_string() };
        // The caller gets the original error; a failure to write this file is ignored.
        let _ = write_json(&self.dir.failure_path(), &failure);
    }

    /// Removes failure.json of an earlier session when the run is resumed.
    pub(super) fn forget_failure(&self) -> Result<()> {
        let path = self.dir.failure_path();
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", &path, e)),
            _ => Ok(()),
        }
    }

    fn is_in_place(&self) -> bool {
        self.dir.is_in_place() && self.metrics.is_in_place() && self.completions.is_in_place()
    }

    /// Checks that the run folder is still in place.
    ///
    /// # Errors
    /// [`Error::Moved`].
    pub(super) fn expect_in_place(&self) -> Result<()> {
        if self.is_in_place() { Ok(()) } else { Err(self.moved()) }
    }

    fn moved(&self) -> Error {
        let last_good = self.saved.map(|position| self.checkpoints.path(position));
        Error::Moved { path: self.dir.root().to_owned(), last_good }
    }
}
