//! The optimizer steps of a phase: learning rates and skipped updates.

use crate::error::{Error, Result};
use grpo_core::{LossOutput, Scores};
use grpo_policy::{Policy, SequenceBatch, StepLoss, UpdateReport};
use grpo_run_config::OptimizerConfig;

/// The report of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Update {
    /// The norm of the whole gradient before clipping.
    pub(crate) grad_norm: f64,
    /// The learning rate of the update; for a skipped one, the learning rate of the next update.
    pub(crate) learning_rate: f64,
    /// `true` if the update was skipped, because `skip_grad_norm` is set and the gradient norm exceeds it or is not finite.
    pub(crate) skipped: bool,
}

/// The learning rate schedule of a phase, and the number of consecutive skipped updates.
///
/// The schedule counts the policy's optimizer steps; skipped updates do not count.
#[derive(Clone, Debug)]
pub(crate) struct Updates {
    pub(crate) config: OptimizerConfig,
    pub(crate) total_steps: u64,
    pub(crate) skipped_in_a_row: u64,
}

impl Updates {
    /// Returns `true` if a non-finite update is skipped instead of ending the run.
    pub(crate) fn skips(&self) -> bool {
        self.config.settings.skip_grad_norm.is_some()
    }

    /// Does an optimizer step of the policy on these micro-batches. `check` returns an error text if the loss is not finite; the update is
    /// then skipped if skipping is enabled.
    ///
    /// # Errors
    /// The errors of [`Policy::step`]; [`Error::Policy`] with the text of `check` if skipping is disabled; [`Error::TooManySkips`] at the
    /// `max_consecutive_skips`th skip in a row. Weights and moments are then unchanged.
    pub(crate) fn step(
        &mut self,
        policy: &mut dyn Policy,
        batches: &[SequenceBatch<'_>],
        loss: StepLoss,
        check: impl FnOnce(&LossOutput) -> Result<(), String>,
    ) -> Result<(LossOutput, Update)> {
        let learning_rate = self.config.learning_rate_at(policy.optimizer_steps(), self.total_steps);
        let (output, report) = policy.step(batches, loss, learning_rate)?;
        if loss == StepLoss::Grpo {
            check_scores("Policy::accumulate", &output.scores, batches)?;
        }
        if let Err(what) = check(&output) {
            if !self.skips() {
                return Err(grpo_policy::Error::NotFinite { what, step: policy.optimizer_steps() }.into());
            }
            tracing::warn!("an update is skipped: {what}");
        }
        Ok((output, self.count(report, learning_rate)?))
    }

    fn count(&mut self, report: UpdateReport, learning_rate: f64) -> Result<Update> {
        let (grad_norm, skipped) = (report.grad_norm, !report.applied);
        let in_a_row = if skipped { self.skipped_in_a_row + 1 } else { 0 };
        if skipped && in_a_row >= self.config.max_consecutive_skips {
            let limit = self.config.settings.skip_grad_norm.unwrap_or(f64::INFINITY);
            return Err(Error::TooManySkips { skipped: in_a_row, grad_norm, limit });
        }
        self.skipped_in_a_row = in_a_row;
        Ok(Update { grad_norm, learning_rate, skipped })
    }
}

/// Checks that a policy has returned a log-probability and an entropy for each token, with 0 for masked ones.
///
/// # Errors
/// [`grpo_policy::Error::Argument`].
pub(crate) fn check_scores(
    operation: &'static str,
    scores: &Scores,
    batches: &[SequenceBatch<'_>],
) -> grpo_policy::Result<()> {
    let tokens: usize = batches.iter().map(|batch| batch.tokens.tokens()).sum();
    for (name, values) in [("logp", &scores.logp), ("entropy", &scores.entropy)] {
        if values.len() != tokens {
            let expected = format!("scores with a value of {name} for each of the {tokens} tokens");
            return Err(grpo_policy::Error::argument(operation, expected, values.len()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_applied_update_ends_a_series_of_skips() {
        let mut config = OptimizerConfig { max_consecutive_skips: 3, ..OptimizerConfig::default() };
        config.settings.skip_grad_norm = Some(2.0);
        let mut updates = Updates { config, total_steps: 10, skipped_in_a_row: 1 };
        let mut count = |grad_norm, applied| updates.count(UpdateReport { grad_norm, applied }, 0.5);
        assert_eq!(count(9.0, false).unwrap(), Update { grad_norm: 9.0, learning_rate: 0.5, skipped: true });
        assert_eq!(count(1.0, true).unwrap(), Update { grad_norm: 1.0, learning_rate: 0.5, skipped: false });
        assert!(count(f64::NAN, false).is_ok() && count(f64::INFINITY, false).is_ok());
        let error = count(9.0, false).unwrap_err();
        assert!(matches!(error, Error::TooManySkips { skipped: 3, grad_norm: 9.0, limit: 2.0 }), "{error}");
        assert_eq!(updates.skipped_in_a_row, 2);
    }
}
