//! The sampled tokens over which a loss is computed.
//!
//! Legend: N tokens (rows of the hidden states or logits), B sequences. The batch is flat: sequence b owns the rows
//! `offsets[b]..offsets[b + 1]`. Padding costs nothing: masked rows are never read and never computed.

use crate::error::{Error, Result};
use std::ops::Range;

mod checks;
mod factors;
mod sampling_mask;
mod step;
mod values;
mod weights;

pub use factors::{PolicyValues, TokenFactors};
pub use sampling_mask::SamplingMask;
pub use step::{Rows, StepData};
pub use values::ValueTargets;
pub use weights::TokenWeights;

/// One advantage per sequence or per token.
///
/// ```
/// use grpo_core::{Advantages, TokenBatch};
///
/// let batch = TokenBatch::packed(vec![3, 7, 1, 0], vec![0, 2, 4])?;
/// let per_token = Advantages::PerToken(vec![1.0, 0.5, -0.5, -1.0]);
/// assert_eq!(batch.clone().with_advantages(per_token)?.advantage(1, 2), -0.5);
/// // A plain list has one advantage per sequence.
/// assert_eq!(batch.with_advantages(vec![1.0, -0.5])?.advantage(1, 2), -0.5);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Advantages {
    /// `[B]`.
    PerSequence(Vec<f32>),
    /// `[N]`; values at masked tokens are not read.
    PerToken(Vec<f32>),
}

impl From<Vec<f32>> for Advantages {
    /// One advantage per sequence.
    fn from(values: Vec<f32>) -> Self {
        Self::PerSequence(values)
    }
}

impl From<&[f32]> for Advantages {
    /// One advantage per sequence.
    fn from(values: &[f32]) -> Self {
        Self::PerSequence(values.to_vec())
    }
}

/// Targets, mask, advantages and recorded log-probabilities of N tokens in B sequences.
///
/// Row i is the position whose logits predict `targets[i]`: the caller has shifted by one.
/// Values at masked tokens (any id, -100, NaN) have no effect.
///
/// ```
/// use grpo_core::TokenBatch;
///
/// // Two completions of 3 and 2 tokens, concatenated.
/// let packed = TokenBatch::packed(vec![3, 7, 1, 4, 0], vec![0, 3, 5])?
///     .with_advantages(vec![1.0, -0.5])?
///     .with_old_logp(vec![-0.7, -1.2, -0.1, -2.3, -0.4])?;
/// assert_eq!((packed.sequences(), packed.active_tokens()), (2, 5));
///
/// // The same as rows [B, T] = [2, 3] with a mask. Values at masked positions have no effect.
/// let padded = TokenBatch::padded(&[3, 7, 1, 4, 0, -100], &[1.0, 1.0, 1.0, 1.0, 1.0, 0.0], [2, 3])?
///     .with_advantages(vec![1.0, -0.5])?
///     .with_old_logp(vec![-0.7, -1.2, -0.1, -2.3, -0.4, f32::NAN])?;
/// assert_eq!((padded.tokens(), padded.active_tokens()), (6, 5));
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TokenBatch {
    targets: Vec<i64>,
    offsets: Vec<usize>,
    mask: Vec<bool>,
    active: Vec<usize>,
    /// Advantages; 0 until set.
    advantages: Advantages,
    has_advantages: bool,
    old_logp: Option<Vec<f32>>,
    ref_logp: Option<Vec<f32>>,
    sampler_logp: Option<Vec<f32>>,
    temperatures: Option<Vec<f32>>,
    sampling_mask: Option<SamplingMask>,
    weights: Option<TokenWeights>,
    factors: Option<TokenFactors>,
    value_targets: Option<ValueTargets>,
    step: StepData,
}

const OP: &str = "token batch";

/// Largest accepted log-probability. A log-probability is at most 0. The margin admits bf16 rounding of a logit minus a logsumexp of
/// some hundreds and noise in synthetic inputs, but not logits, probabilities in per cent or negative log-likelihoods.
pub const LARGEST_LOGP: f32 = 2.0;

impl TokenBatch {
    /// Creates a batch of sequences that are concatenated without padding: `targets: [N]`, `offsets: [B + 1]` from 0 to N, never decreasing.
    /// Ids are `u32`, as tokenizers return them, `i64` or `i32`. Every token is active. The batch can be scored without more inputs; a loss
    /// needs advantages ([`TokenBatch::with_advantages`]).
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Value`] if the offsets do not have this form.
    pub fn packed<T: Into<i64>>(targets: Vec<T>, offsets: Vec<usize>) -> Result<Self> {
        let targets: Vec<i64> = targets.into_iter().map(Into::into).collect();
        if offsets.first() != Some(&0) || offsets.last() != Some(&targets.len()) {
            return Err(Error::shape(
                OP,
                "offsets",
                format!("a list from 0 to {} (the number of targets)", targets.len()),
                format!("{} entries from {:?} to {:?}", offsets.len(), offsets.first(), offsets.last()),
            ));
        }
        if let Some(b) = offsets.windows(2).position(|w| w[0] > w[1]) {
            return Err(Error::value("offsets", format!("entry {}", b + 1), "smaller than the one before"));
        }
        let active = (0..targets.len()).collect();
        Ok(Self {
            mask: vec![true; targets.len()],
            active,
            advantages: Advantages::PerSequence(vec![0.0; offsets.len() - 1]),
            has_advantages: false,
            targets,
            offsets,
            old_logp: None,
            ref_logp: None,
            sampler_logp: None,
            temperatures: None,
            sampling_mask: None,
            weights: None,
            factors: None,
            value_targets: None,
            step: StepData::default(),
        })
    }

    /// Creates a batch from `[B, T]` tensors: `targets` and `mask` are row-major, and the mask is 1 at completion tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for wrong lengths or T = 0, [`Error::Value`] for a mask entry that is neither 0 nor 1.
    pub fn padded<T: Into<i64> + Copy>(targets: &[T], mask: &[f32], [b, t]: [usize; 2]) -> Result<Self> {
        let n = b
            .checked_mul(t)
            .ok_or_else(|| Error::shape(OP, "B x T", "a product that fits usize", format!("{b} x {t}")))?;
        if targets.len() != n {
            return Err(Error::shape(OP, "targets [B, T]", n, targets.len()));
        }
        Self::packed(targets.to_vec(), (0..=b).map(|i| i * t).collect())?.with_mask(mask)
    }

    /// Sets the mask `[N]`: 1 at active tokens, 0 at masked tokens. Set it before lists that hold NaN at masked
    /// tokens: every list is checked against the current mask.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for an entry that is neither 0 nor 1, or for a token that
    /// becomes active although an earlier list is not finite there.
    pub fn with_mask(mut self, mask: &[f32]) -> Result<Self> {
        self.check_len("mask", mask.len())?;
        if let Some(i) = mask.iter().position(|m| *m != 0.0 && *m != 1.0) {
            let reason = format!("{} is neither 0 nor 1; per-token weights are not a mask", mask[i]);
            return Err(Error::value("mask", self.position(i), reason));
        }
        self.mask = mask.iter().map(|m| *m == 1.0).collect();
        self.active = (0..mask.len()).filter(|i| self.mask[*i]).collect();
        self.check_advantages()?;
        for (name, list) in [("old_logp", &self.old_logp), ("ref_logp", &self.ref_logp)] {
            list.as_ref().map_or(Ok(()), |list| self.check_logps(name, list))?;
        }
        self.sampler_logp.as_ref().map_or(Ok(()), |list| self.check_sampler_logps(list))?;
        self.temperatures.as_ref().map_or(Ok(()), |list| self.check_temperatures(list))?;
        self.sampling_mask.as_ref().map_or(Ok(()), |mask| self.check_sampling_mask(mask))?;
        self.weights.as_ref().map_or(Ok(()), |weights| self.check_weights(weights))?;
        Ok(self)
    }

    /// Sets the advantages; a plain list has one per sequence.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a value that is not finite at an active token.
    pub fn with_advantages(mut self, advantages: impl Into<Advantages>) -> Result<Self> {
        let advantages = advantages.into();
        let (expected, values) = match &advantages {
            Advantages::PerSequence(v) => (self.sequences(), v),
            Advantages::PerToken(v) => (self.tokens(), v),
        };
        if values.len() != expected {
            return Err(Error::shape(OP, "advantages", expected, values.len()));
        }
        self.advantages = advantages;
        self.has_advantages = true;
        self.check_advantages()?;
        Ok(self)
    }

    /// Sets the log-probabilities `[N]` of the old policy, the denominator of the ratio. Without them the step is
    /// on-policy: old = stop_gradient(logp), so that every ratio is 1.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a value at an active token that is not finite or exceeds 0 by more
    /// than rounding ([`LARGEST_LOGP`]).
    pub fn with_old_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_logps("old_logp", &logp)?;
        self.old_logp = Some(logp);
        Ok(self)
    }

    /// Sets the log-probabilities `[N]` of the reference policy, for the KL term.
    ///
    /// # Errors
    /// The errors of [`TokenBatch::with_old_logp`].
    pub fn with_ref_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_logps("ref_logp", &logp)?;
        self.ref_logp = Some(logp);
        Ok(self)
    }

    /// Sets the log-probabilities `[N]` that the sampler reported; NaN marks an unknown one.
    ///
    /// # Errors
    /// The errors of [`TokenBatch::with_old_logp`], except that NaN is legal.
    pub fn with_sampler_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_sampler_logps(&logp)?;
        self.sampler_logp = Some(logp);
        Ok(self)
    }

    /// Sets the sampling temperature of each token `[N]`, which replaces the configuration's; from 1e-6 to 1e6 at
    /// active tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a value outside that range at an active token.
    pub fn with_temperatures(mut self, temperatures: Vec<f32>) -> Result<Self> {
        self.check_temperatures(&temperatures)?;
        self.temperatures = Some(temperatures);
        Ok(self)
    }

    /// Sets the aggregation weights of the whole optimizer step ([`crate::aggregate::token_weights`]). Without them the batch is one whole
    /// step. A batch with weights counts as prepared: its mask is final. [`crate::LossConfig::prepare_step`] masks and weighs in one call.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a weight that is not finite at an active token.
    pub fn with_weights(mut self, weights: TokenWeights) -> Result<Self> {
        self.check_weights(&weights)?;
        self.weights = Some(weights);
        Ok(self)
    }

    /// Sets the factors of each token's terms ([`crate::LossConfig::prepare`]); call this before splitting a step whose tokens
    /// are selected. Without them [`crate::LossConfig::prepare`] computes them for each batch.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a factor that is not finite at an active token.
    pub fn with_factors(mut self, factors: TokenFactors) -> Result<Self> {
        let lists = [
            ("factors.policy", &factors.policy),
            ("factors.entropy", &factors.entropy),
            ("factors.log_ratio_scale", &factors.log_ratio_scale),
            ("factors.kl_cov_mask", &factors.kl_cov_mask),
            ("factors.log_ratio_bias", &factors.log_ratio_bias),
        ];
        lists.into_iter().try_for_each(|(name, list)| self.check_numbers(name, list))?;
        self.factors = Some(factors);
        Ok(self)
    }

    /// Sets the data of the optimizer step: truncated or positive rows, counts over all processes, coefficients of the step. The loss uses
    /// them if the batch has no weights yet.
    ///
    /// # Errors
    /// [`Error::Config`] for rows that the batch does not have and for illegal numbers.
    pub fn with_step(mut self, step: StepData) -> Result<Self> {
        step.check(self.sequences())?;
        self.step = step;
        Ok(self)
    }

    /// Returns the sequences `range` of an optimizer step as a micro-batch, with their weights in the step: the losses and gradients of
    /// micro-batches add up to the loss and gradient of the step. [`crate::LossConfig::prepare_step`] computes the weights.
    ///
    /// # Errors
    /// [`Error::NoWeights`] if the batch has no weights; [`Error::Shape`] if the range does not lie within the batch.
    pub fn select_sequences(&self, range: Range<usize>) -> Result<Self> {
        let Some(weights) = &self.weights else { return Err(Error::NoWeights) };
        let part = self.select_independent(range.clone())?;
        Ok(Self { weights: Some(weights.select(self.offsets[range.start]..self.offsets[range.end])), ..part })
    }

    /// Returns the sequences `range` as an independent batch, for scores or for an optimizer step of their own: with all their data except
    /// the weights, so a loss averages over these sequences alone.
    ///
    /// # Errors
    /// [`Error::Shape`] if the range does not lie within the batch.
    pub fn select_independent(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.sequences() {
            return Err(Error::shape(
                OP,
                "sequence range",
                format!("within 0..{}", self.sequences()),
                format!("{range:?}"),
            ));
        }
        let rows = self.offsets[range.start]..self.offsets[range.end];
        let cut = |v: &Vec<f32>| v[rows.clone()].to_vec();
        let step = self.step.select(&range);
        Ok(Self {
            targets: self.targets[rows.clone()].to_vec(),
            offsets: self.offsets[range.start..=range.end].iter().map(|o| o - rows.start).collect(),
            mask: self.mask[rows.clone()].to_vec(),
            active: (0..rows.len()).filter(|i| self.mask[rows.start + i]).collect(),
            advantages: match &self.advantages {
                Advantages::PerSequence(v) => Advantages::PerSequence(v[range].to_vec()),
                Advantages::PerToken(v) => Advantages::PerToken(cut(v)),
            },
            has_advantages: self.has_advantages,
            old_logp: self.old_logp.as_ref().map(cut),
            ref_logp: self.ref_logp.as_ref().map(cut),
            sampler_logp: self.sampler_logp.as_ref().map(cut),
            temperatures: self.temperatures.as_ref().map(cut),
            sampling_mask: self.sampling_mask.as_ref().map(|mask| mask.select(rows.clone())),
            weights: None,
            factors: self.factors.as_ref().map(|factors| factors.select(rows.clone())),
            value_targets: self.value_targets.as_ref().map(|targets| targets.select(rows.clone())),
            step,
        })
    }

    /// Returns the tokens with the data that scores depend on: mask, temperatures and sampling mask.
    pub(crate) fn scored_only(&self) -> Self {
        Self {
            advantages: Advantages::PerSequence(vec![0.0; self.sequences()]),
            has_advantages: false,
            old_logp: None,
            ref_logp: None,
            sampler_logp: None,
            weights: None,
            factors: None,
            value_targets: None,
            step: StepData::default(),
            ..self.clone()
        }
    }

    /// Returns the number of tokens N, including masked ones: the rows of hidden states or logits.
    pub fn tokens(&self) -> usize {
        self.targets.len()
    }

    /// Returns the number of sequences B, including fully masked ones.
    pub fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns the number of tokens whose mask is 1.
    pub fn active_tokens(&self) -> usize {
        self.active.len()
    }

    /// Returns the rows whose mask is 1, ascending.
    pub fn active_rows(&self) -> &[usize] {
        &self.active
    }

    /// Returns the number of active tokens of one sequence.
    pub fn active_in(&self, sequence: usize) -> usize {
        self.mask[self.range(sequence)].iter().filter(|m| **m).count()
    }

    /// Iterates over the active rows of each sequence that has any.
    pub(crate) fn active_sequences(&self) -> impl Iterator<Item = Vec<usize>> {
        let rows = |sequence| self.range(sequence).filter(|row| self.is_active(*row)).collect::<Vec<_>>();
        (0..self.sequences()).map(rows).filter(|rows| !rows.is_empty())
    }

    /// Returns the rows of one sequence.
    pub fn range(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    /// Returns `true` if the mask of a row is 1.
    pub fn is_active(&self, row: usize) -> bool {
        self.mask[row]
    }

    /// Returns the token ids `[N]`.
    pub fn targets(&self) -> &[i64] {
        &self.targets
    }

    /// Returns the row offsets of the sequences `[B + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Returns `true` if advantages were set; a loss refuses a batch without them.
    pub fn has_advantages(&self) -> bool {
        self.has_advantages
    }

    /// Returns the advantages as set; 0 for every sequence before.
    pub fn advantages(&self) -> &Advantages {
        &self.advantages
    }

    /// Returns the advantage of a row of `sequence`.
    pub fn advantage(&self, sequence: usize, row: usize) -> f32 {
        match &self.advantages {
            Advantages::PerSequence(v) => v[sequence],
            Advantages::PerToken(v) => v[row],
        }
    }

    /// Returns the log-probabilities of the old policy `[N]`.
    pub fn old_logp(&self) -> Option<&[f32]> {
        self.old_logp.as_deref()
    }

    /// Returns the log-probabilities of the reference policy `[N]`.
    pub fn ref_logp(&self) -> Option<&[f32]> {
        self.ref_logp.as_deref()
    }

    /// Returns the log-probabilities that the sampler reported `[N]`.
    pub fn sampler_logp(&self) -> Option<&[f32]> {
        self.sampler_logp.as_deref()
    }

    /// Returns the temperatures `[N]`, if tokens have their own.
    pub fn temperatures(&self) -> Option<&[f32]> {
        self.temperatures.as_deref()
    }

    /// Returns the temperature of a row, if tokens have their own.
    pub fn temperature(&self, row: usize) -> Option<f32> {
        self.temperatures.as_ref().map(|list| list[row])
    }

    /// Returns the aggregation weights of the step, if set.
    pub fn weights(&self) -> Option<&TokenWeights> {
        self.weights.as_ref()
    }

    /// Returns the factors of each token's terms, if set.
    pub fn factors(&self) -> Option<&TokenFactors> {
        self.factors.as_ref()
    }

    /// Returns the data of the optimizer step.
    pub fn step(&self) -> &StepData {
        &self.step
    }

    /// Returns the tokens that are active here but not in `other`, a batch of the same tokens; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Shape`] if `other` has a different number of tokens.
    pub fn without(&self, other: &Self) -> Result<Option<Self>> {
        self.check_len("other batch", other.tokens())?;
        if self.active_tokens() == other.active_tokens() {
            return Ok(None);
        }
        let only_here = |row: usize| f32::from(u8::from(self.is_active(row) && !other.is_active(row)));
        let mask: Vec<f32> = (0..self.tokens()).map(only_here).collect();
        self.clone().with_mask(&mask).map(Some)
    }

    /// Returns the mask as numbers `[N]`.
    pub fn mask(&self) -> Vec<f32> {
        self.mask.iter().map(|active| f32::from(u8::from(*active))).collect()
    }
}

#[cfg(test)]
mod tests;
