//! The preparation of a batch, before its loss runs: what depends on all of its tokens, and has no derivative.

use crate::aggregate::token_weights;
use crate::batch::{PolicyValues, TokenBatch, TokenFactors};
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::{mismatch, sampler, selection};
use std::borrow::Cow;

impl LossConfig {
    /// `batch` as the loss takes it: truncated and rejected sequences masked, the sampler's weight and the choice of
    /// tokens made.
    ///
    /// `score` gives log-probabilities and entropies of the policy for a batch, one forward pass; it is called only where
    /// they are needed: to choose tokens ([`LossConfig::selects_tokens`]), or to correct for the sampler where the batch
    /// has no `old_logp`, which is then the policy's own.
    ///
    /// What a batch brings is left alone: with weights it is part of a step, whose masks are the caller's; with factors
    /// nothing is chosen again. So a step that is cut after `prepare` chooses from all of its tokens.
    ///
    /// # Errors
    /// [`crate::Error::Config`] where the batch lacks what the configuration needs, or its numbers do not fit the batch;
    /// [`crate::Error::Value`] where a weight of the sampler overflows; those of `score`.
    pub fn prepare<'a, E: From<Error>>(
        &self,
        batch: &'a TokenBatch,
        score: impl FnOnce(&TokenBatch) -> Result<PolicyValues, E>,
    ) -> Result<Cow<'a, TokenBatch>, E> {
        let mut batch = Cow::Borrowed(batch);
        let whole = batch.weights().is_none();
        if whole && let Some(mask) = self.truncated_mask(&batch) {
            batch = Cow::Owned(batch.into_owned().with_mask(&mask)?);
        }
        if batch.sampler_logp().is_none() && batch.factors().is_none() {
            let asked = [("rollout_is", self.rollout_is.is_some()), ("rollout_rs", self.rollout_rs.is_some())];
            if let Some((key, _)) = asked.iter().find(|(_, asked)| *asked) {
                let message =
                    format!("{key} compares the old policy with the sampler, but the batch has no sampler_logp");
                return Err(Error::Config(message).into());
            }
        }
        let corrects =
            batch.sampler_logp().is_some() && (self.sampler_correction().is_some() || self.rollout_rs.is_some());
        // What can be said of the sampler without a forward pass is said, whether or not the loss corrects for it.
        let compares = batch.sampler_logp().is_some() && batch.old_logp().is_some();
        if batch.factors().is_none() && (corrects || compares || self.selects_tokens()) {
            let mut of_step = batch.into_owned();
            let values = match self.selects_tokens() || (corrects && of_step.old_logp().is_none()) {
                true => Some(score(&of_step)?),
                false => None,
            };
            let mut factors = TokenFactors::new(of_step.tokens());
            if !corrects && compares {
                mismatch::record(&of_step, &sampler::log_ratios(&of_step, None), &mut factors.metrics);
            }
            if corrects {
                // verl weighs before it rejects.
                let log_ratios = sampler::log_ratios(&of_step, values.as_ref());
                mismatch::record(&of_step, &log_ratios, &mut factors.metrics);
                sampler::weigh(self, &of_step, &log_ratios, &mut factors)?;
                if whole && let Some(mask) = sampler::rejection_mask(self, &of_step, &log_ratios)? {
                    mismatch::record_rejected(&of_step, &mask, &mut factors.metrics);
                    of_step = of_step.with_mask(&mask)?;
                }
                sampler::share_weights(self, &of_step, &mut factors);
            }
            if let Some(values) = &values {
                selection::select(self, &of_step, values, &mut factors);
            }
            batch = Cow::Owned(of_step.with_factors(factors)?);
        }
        match batch {
            // What has been prepared is not prepared again.
            Cow::Owned(batch) if whole => {
                let weights = token_weights(self, &batch)?;
                Ok(Cow::Owned(batch.with_weights(weights)?))
            }
            batch => Ok(batch),
        }
    }

    /// The mask `[N]` without the truncated sequences, if it differs.
    fn truncated_mask(&self, batch: &TokenBatch) -> Option<Vec<f32>> {
        let truncated = batch.step().truncated_rows.indices();
        if !self.mask_truncated_completions || truncated.is_empty() {
            return None;
        }
        let mut mask = batch.mask();
        truncated.into_iter().for_each(|sequence| mask[batch.range(sequence)].fill(0.0));
        Some(mask)
    }
}
