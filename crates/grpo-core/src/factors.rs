//! What multiplies the terms of a token without a derivative of its own: the sampler's weight, and which tokens were
//! chosen. Made by [`LossConfig::prepare`], before the loss runs.

use crate::batch::TokenBatch;
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::weights::token_weights;
use crate::{Scores, mismatch, sampler, selection};
use std::borrow::Cow;

/// What the policy says of a batch, before its loss is known: `[N]` each, in nats. Masked tokens may hold anything finite.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyValues {
    /// Log-probabilities.
    pub logp: Vec<f64>,
    /// Entropies.
    pub entropy: Vec<f64>,
}

impl From<Scores> for PolicyValues {
    fn from(scores: Scores) -> Self {
        let widened = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
        Self { logp: widened(scores.logp), entropy: widened(scores.entropy) }
    }
}

/// One entry per token `[N]` in each list; 1, 1, 1, 0 and 0 where nothing is special.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenFactors {
    /// Of the policy term.
    pub policy: Vec<f64>,
    /// Of the weight in the entropy bonus.
    pub entropy: Vec<f64>,
    /// Of what the token adds to the log-ratio of its sequence.
    pub log_ratio_scale: Vec<f64>,
    /// kl_cov: 1 where the penalty is paid.
    pub kl_cov_mask: Vec<f64>,
    /// What is added to the log-ratio of the token's sequence (vespo).
    pub log_ratio_bias: Vec<f64>,
    /// What was found on the way, under TRL's names (`sampling/...`).
    pub metrics: Metrics,
}

impl TokenFactors {
    /// Nothing special for `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        Self {
            policy: vec![1.0; tokens],
            entropy: vec![1.0; tokens],
            log_ratio_scale: vec![1.0; tokens],
            kl_cov_mask: vec![0.0; tokens],
            log_ratio_bias: vec![0.0; tokens],
            metrics: Metrics::default(),
        }
    }

    /// The tokens `rows`. What was found stays with the whole.
    pub(crate) fn select(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |list: &[f64]| list[rows.clone()].to_vec();
        Self {
            policy: cut(&self.policy),
            entropy: cut(&self.entropy),
            log_ratio_scale: cut(&self.log_ratio_scale),
            kl_cov_mask: cut(&self.kl_cov_mask),
            log_ratio_bias: cut(&self.log_ratio_bias),
            metrics: Metrics::default(),
        }
    }
}

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
        if whole && let Some(mask) = self.truncated_mask(&batch)? {
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
    fn truncated_mask(&self, batch: &TokenBatch) -> Result<Option<Vec<f32>>> {
        if !self.mask_truncated_completions || self.truncated_rows.is_empty() {
            return Ok(None);
        }
        let rows = self.truncated_rows.indices(batch.sequences());
        let rows = rows.map_err(|why| Error::Config(format!("truncated_rows {why}")))?;
        let mut mask = batch.mask();
        rows.into_iter().for_each(|sequence| mask[batch.range(sequence)].fill(0.0));
        Ok(Some(mask))
    }
}
