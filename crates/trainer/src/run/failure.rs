//! What ends a run before its end, and what to do about it.

use super::Run;
use crate::error::{Error, Result};
use crate::trainer::Phase;

impl Run {
    /// What to do about an error that ends the run.
    pub(super) fn explain(&self, error: Error) -> Error {
        if !matches!(error, Error::Moved { .. }) && !self.is_in_place() {
            return self.moved();
        }
        if !is_divergence(&error) {
            return error;
        }
        // How it went until here is worth a look; that it cannot be drawn is not what is to be said.
        let _ = self.draw_curves();
        let config = self.trainer.config();
        let (section, optimizer) = match self.trainer.phase() {
            Phase::Warmup => ("warmup.optimizer", &config.warmup.optimizer),
            _ => ("optimizer", &config.optimizer),
        };
        Error::Diverged {
            cause: Box::new(error),
            run: self.dir.root().to_owned(),
            last_finite: self.saved.map(|position| position.to_string()),
            section,
            learning_rate: optimizer.learning_rate,
        }
    }

    fn is_in_place(&self) -> bool {
        self.dir.is_in_place() && self.metrics.is_in_place() && self.completions.is_in_place()
    }

    /// [`Error::Moved`] when what is written now would not be where the run is.
    pub(super) fn expect_in_place(&self) -> Result<()> {
        if self.is_in_place() { Ok(()) } else { Err(self.moved()) }
    }

    fn moved(&self) -> Error {
        let last_good = self.saved.map(|position| self.checkpoints.path(position));
        Error::Moved { path: self.dir.root().to_owned(), last_good }
    }
}

/// Whether numbers have left the range in which a run can go on.
fn is_divergence(error: &Error) -> bool {
    matches!(error, Error::Policy(policy::Error::NotFinite { .. }) | Error::TooManySkips { .. })
}
