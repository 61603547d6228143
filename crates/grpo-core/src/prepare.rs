//! Preparation of a batch before its loss: steps that depend on all of its tokens and have no derivative.

use crate::aggregate::token_weights;
use crate::batch::{PolicyValues, TokenBatch, TokenFactors};
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::{mismatch, sampler, selection};
use std::borrow::Cow;

impl LossConfig {
    /// Prepares `batch` as one optimizer step: masks truncated and rejected sequences, computes the sampler's weight, the selection of
    /// tokens and the weights of the average. The losses of its parts ([`TokenBatch::select_sequences`]) then add up to the loss of the step.
    ///
    /// `score` returns log-probabilities and entropies of the policy for a batch, at the cost of one forward pass. It is called only to
    /// select tokens ([`LossConfig::selects_tokens`]), or to correct for the sampler if the batch
    /// has no `old_logp`; the policy's own log-probabilities then replace it.
    ///
    /// Data that the batch already has is kept: a batch with weights is part of a step, whose masks are the caller's; a batch with factors
    /// is not selected from again. A step that is split after `prepare` therefore selects from all of its tokens.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the batch lacks an input that the configuration needs, or if counts do not fit the batch;
    /// [`crate::Error::Value`] if a weight of the sampler overflows; the errors of `score`.
    pub fn prepare<'a, E: From<Error>>(
        &self,
        batch: &'a TokenBatch,
        score: impl FnOnce(&TokenBatch) -> Result<PolicyValues, E>,
    ) -> Result<Cow<'a, TokenBatch>, E> {
        let batch = self.prepare_tokens(batch, score)?;
        match batch.weights() {
            Some(_) => Ok(batch),
            None => {
                let weights = token_weights(self, &batch)?;
                Ok(Cow::Owned(batch.into_owned().with_weights(weights)?))
            }
        }
    }

    /// Prepares `batch` like [`LossConfig::prepare`], for a configuration that needs no scores of the policy.
    ///
    /// ```
    /// use grpo_core::{LossConfig, TokenBatch};
    ///
    /// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 1, 4])?.with_advantages(vec![1.0, -0.5])?;
    /// let step = LossConfig::dapo().prepare_step(&batch)?;
    /// let part = step.select_sequences(0..1)?; // one of four tokens
    /// assert_eq!(part.weights().map(|weights| weights.policy.clone()), Some(vec![0.25]));
    /// # Ok::<(), grpo_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the configuration needs scores; the errors of [`LossConfig::prepare`].
    pub fn prepare_step(&self, batch: &TokenBatch) -> Result<TokenBatch> {
        let missing = |_: &TokenBatch| {
            let key = if self.selects_tokens() {
                "selects tokens by scores of the whole step"
            } else {
                "corrects for the sampler, and the batch has no old_logp"
            };
            Err(Error::Config(format!(
                "the loss {key}: call LossConfig::prepare with a function that scores the batch"
            )))
        };
        Ok(self.prepare(batch, missing)?.into_owned())
    }

    /// Prepares the tokens of `batch` like [`LossConfig::prepare`]; a batch that does not change has no weights.
    pub(crate) fn prepare_tokens<'a, E: From<Error>>(
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
        // Metrics of the sampler mismatch are recorded if no forward pass is needed, even without a correction.
        let compares = batch.sampler_logp().is_some() && batch.old_logp().is_some();
        if batch.factors().is_none() && (corrects || compares || self.selects_tokens()) {
            let mut of_step = batch.into_owned();
            let values = match self.selects_tokens() || (corrects && of_step.old_logp().is_none()) {
                true => {
                    let values = score(&of_step)?;
                    for (name, list) in [("logp", &values.logp), ("entropy", &values.entropy)] {
                        of_step.check_len(&format!("scores.{name}"), list.len())?;
                    }
                    Some(values)
                }
                false => None,
            };
            let mut factors = TokenFactors::new(of_step.tokens());
            if !corrects && compares {
                mismatch::record(&of_step, &sampler::log_ratios(&of_step, None), &mut factors.metrics);
            }
            if corrects {
                // verl computes weights before it rejects.
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
            // A second call must not prepare the batch again.
            Cow::Owned(batch) if whole => {
                let weights = token_weights(self, &batch)?;
                Ok(Cow::Owned(batch.with_weights(weights)?))
            }
            batch => Ok(batch),
        }
    }

    /// Returns the mask `[N]` without the truncated sequences, if it differs from the current mask.
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
