//! The sampled tokens that a loss is taken over.
//!
//! Legend: N tokens (rows of the hidden states or logits), B sequences. The batch is flat: sequence b owns the rows
//! `offsets[b]..offsets[b + 1]`. Padding costs nothing: masked rows are never read and never computed.

use crate::error::{Error, Result};
use std::ops::Range;

mod checks;
mod factors;
mod step;
mod values;
mod weights;

pub use factors::{PolicyValues, TokenFactors};
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
/// // A list without more is one per sequence.
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
    /// One per sequence.
    fn from(values: Vec<f32>) -> Self {
        Self::PerSequence(values)
    }
}

impl From<&[f32]> for Advantages {
    /// One per sequence.
    fn from(values: &[f32]) -> Self {
        Self::PerSequence(values.to_vec())
    }
}

/// Targets, mask, advantages and recorded log-probabilities of N tokens in B sequences.
///
/// Row i is the position whose logits predict `targets[i]`: the caller has done the shift by one.
/// Values at masked tokens (any id, -100, NaN) have no effect.
///
/// ```
/// use grpo_core::TokenBatch;
///
/// // Two completions of 3 and 2 tokens, laid end to end.
/// let packed = TokenBatch::packed(vec![3, 7, 1, 4, 0], vec![0, 3, 5])?
///     .with_advantages(vec![1.0, -0.5])?
///     .with_old_logp(vec![-0.7, -1.2, -0.1, -2.3, -0.4])?;
/// assert_eq!((packed.sequences(), packed.active_tokens()), (2, 5));
///
/// // The same as rows [B, T] = [2, 3] with a mask. What masked positions hold has no effect.
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
    /// Advantages; 0 until they are set.
    advantages: Advantages,
    has_advantages: bool,
    old_logp: Option<Vec<f32>>,
    ref_logp: Option<Vec<f32>>,
    sampler_logp: Option<Vec<f32>>,
    temperatures: Option<Vec<f32>>,
    weights: Option<TokenWeights>,
    factors: Option<TokenFactors>,
    value_targets: Option<ValueTargets>,
    step: StepData,
}

const OP: &str = "token batch";

/// The largest log-probability that is taken for one. A log-probability is at most 0; this leaves room for what rounding to
/// bf16 makes of a logit less a logsumexp of some hundreds, and for noise in inputs that somebody has made up, and none for
/// logits, probabilities in per cent and negative log-likelihoods.
pub const LARGEST_LOGP: f32 = 2.0;

impl TokenBatch {
    /// Sequences laid end to end without padding: `targets: [N]`, `offsets: [B + 1]` from 0 to N, never decreasing.
    /// Every token is active. The batch can be scored as it is; a loss needs advantages
    /// ([`TokenBatch::with_advantages`]).
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Value`] when the offsets are not of that form.
    pub fn packed(targets: Vec<i64>, offsets: Vec<usize>) -> Result<Self> {
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
            weights: None,
            factors: None,
            value_targets: None,
            step: StepData::default(),
        })
    }

    /// The `[B, T]` + mask form that everyone has: `targets` and `mask` row-major, mask 1 at completion tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for wrong lengths or T = 0, [`Error::Value`] for a mask entry that is neither 0 nor 1.
    pub fn padded(targets: &[i64], mask: &[f32], [b, t]: [usize; 2]) -> Result<Self> {
        let n = b
            .checked_mul(t)
            .ok_or_else(|| Error::shape(OP, "B x T", "a product that fits usize", format!("{b} x {t}")))?;
        if targets.len() != n {
            return Err(Error::shape(OP, "targets [B, T]", n, targets.len()));
        }
        Self::packed(targets.to_vec(), (0..=b).map(|i| i * t).collect())?.with_mask(mask)
    }

    /// Sets the mask `[N]`: 1 at tokens that count, 0 at those that do not. Set it before what may hold NaN at masked
    /// tokens: every list is checked against the mask of the moment.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for an entry that is neither 0 nor 1, or for a token that
    /// becomes active although a list set before is not finite there.
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
        self.weights.as_ref().map_or(Ok(()), |weights| self.check_weights(weights))?;
        Ok(self)
    }

    /// Sets the advantages; a list without more is one per sequence.
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

    /// Sets the log-probabilities `[N]` of the policy that the ratio is taken against. Without them the step is
    /// on-policy: old = stop_gradient(logp), so that every ratio is 1.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a value at an active token that no log-probability has: one
    /// that is not finite, or above 0 by more than rounding ([`LARGEST_LOGP`]).
    pub fn with_old_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_logps("old_logp", &logp)?;
        self.old_logp = Some(logp);
        Ok(self)
    }

    /// Sets the log-probabilities `[N]` of the reference, for the KL term.
    ///
    /// # Errors
    /// As [`TokenBatch::with_old_logp`].
    pub fn with_ref_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_logps("ref_logp", &logp)?;
        self.ref_logp = Some(logp);
        Ok(self)
    }

    /// Sets the log-probabilities `[N]` that the sampler reported; NaN where it reported none.
    ///
    /// # Errors
    /// As [`TokenBatch::with_old_logp`], but NaN is legal.
    pub fn with_sampler_logp(mut self, logp: Vec<f32>) -> Result<Self> {
        self.check_sampler_logps(&logp)?;
        self.sampler_logp = Some(logp);
        Ok(self)
    }

    /// Sets the temperatures `[N]` that the tokens were sampled at, each in place of the configuration's; from 1e-6 to 1e6 at
    /// active tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a value outside that range at an active token.
    pub fn with_temperatures(mut self, temperatures: Vec<f32>) -> Result<Self> {
        self.check_temperatures(&temperatures)?;
        self.temperatures = Some(temperatures);
        Ok(self)
    }

    /// Sets the aggregation weights of the whole optimizer step ([`crate::aggregate::token_weights`]); do this before
    /// cutting a step into micro-batches. Without them the batch is taken as one whole step.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for a weight that is not finite at an active token.
    pub fn with_weights(mut self, weights: TokenWeights) -> Result<Self> {
        self.check_weights(&weights)?;
        self.weights = Some(weights);
        Ok(self)
    }

    /// Sets what multiplies the terms of each token ([`crate::LossConfig::prepare`]); do this before cutting a step of which tokens
    /// are chosen. Without them [`crate::LossConfig::prepare`] makes them for each batch.
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

    /// Sets what is known of the optimizer step: rows that were cut off or right, counts of all processes, coefficients that
    /// move. The loss takes it where the batch has no weights yet.
    ///
    /// # Errors
    /// [`Error::Config`] for rows that the batch does not have and numbers that are none.
    pub fn with_step(mut self, step: StepData) -> Result<Self> {
        step.check(self.sequences())?;
        self.step = step;
        Ok(self)
    }

    /// The sequences `range` as a batch of their own, with everything that belongs to them. A micro-batch needs the
    /// weights of its step ([`TokenBatch::with_weights`]) set before the cut; without them it is a whole step of its own,
    /// and the losses of the parts do not add up to that of the whole.
    ///
    /// # Errors
    /// [`Error::Shape`] when the range does not lie within the batch.
    pub fn select_sequences(&self, range: Range<usize>) -> Result<Self> {
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
            weights: self.weights.as_ref().map(|weights| weights.select(rows.clone())),
            factors: self.factors.as_ref().map(|factors| factors.select(rows.clone())),
            value_targets: self.value_targets.as_ref().map(|targets| targets.select(rows.clone())),
            step,
        })
    }

    /// Number of tokens N, masked ones included: the rows of hidden states or logits.
    pub fn tokens(&self) -> usize {
        self.targets.len()
    }

    /// Number of sequences B, fully masked ones included.
    pub fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of tokens whose mask is 1.
    pub fn active_tokens(&self) -> usize {
        self.active.len()
    }

    /// The rows whose mask is 1, ascending.
    pub fn active_rows(&self) -> &[usize] {
        &self.active
    }

    /// Number of active tokens of one sequence.
    pub fn active_in(&self, sequence: usize) -> usize {
        self.mask[self.range(sequence)].iter().filter(|m| **m).count()
    }

    /// The active rows of each sequence that has any.
    pub(crate) fn active_sequences(&self) -> impl Iterator<Item = Vec<usize>> {
        let rows = |sequence| self.range(sequence).filter(|row| self.is_active(*row)).collect::<Vec<_>>();
        (0..self.sequences()).map(rows).filter(|rows| !rows.is_empty())
    }

    /// The rows of one sequence.
    pub fn range(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    /// Whether the mask of a row is 1.
    pub fn is_active(&self, row: usize) -> bool {
        self.mask[row]
    }

    /// Token ids `[N]`.
    pub fn targets(&self) -> &[i64] {
        &self.targets
    }

    /// Row offsets of the sequences `[B + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Whether advantages were set: a loss refuses a batch without them.
    pub fn has_advantages(&self) -> bool {
        self.has_advantages
    }

    /// The advantages as they were given; 0 for every sequence until then.
    pub fn advantages(&self) -> &Advantages {
        &self.advantages
    }

    /// The advantage of a row, given the sequence it belongs to.
    pub fn advantage(&self, sequence: usize, row: usize) -> f32 {
        match &self.advantages {
            Advantages::PerSequence(v) => v[sequence],
            Advantages::PerToken(v) => v[row],
        }
    }

    /// Log-probabilities of the old policy `[N]`.
    pub fn old_logp(&self) -> Option<&[f32]> {
        self.old_logp.as_deref()
    }

    /// Log-probabilities of the reference `[N]`.
    pub fn ref_logp(&self) -> Option<&[f32]> {
        self.ref_logp.as_deref()
    }

    /// Log-probabilities that the sampler reported `[N]`.
    pub fn sampler_logp(&self) -> Option<&[f32]> {
        self.sampler_logp.as_deref()
    }

    /// Temperatures `[N]`, if tokens have their own.
    pub fn temperatures(&self) -> Option<&[f32]> {
        self.temperatures.as_deref()
    }

    /// The temperature of a row, if tokens have their own.
    pub fn temperature(&self, row: usize) -> Option<f32> {
        self.temperatures.as_ref().map(|list| list[row])
    }

    /// Aggregation weights of the step, if they were set.
    pub fn weights(&self) -> Option<&TokenWeights> {
        self.weights.as_ref()
    }

    /// What multiplies the terms of each token, if it was set.
    pub fn factors(&self) -> Option<&TokenFactors> {
        self.factors.as_ref()
    }

    /// What is known of the optimizer step.
    pub fn step(&self) -> &StepData {
        &self.step
    }

    /// The tokens that are active here but not in `other`, a batch of the same tokens; `None` when there are none.
    ///
    /// # Errors
    /// [`Error::Shape`] when `other` has another number of tokens.
    pub fn without(&self, other: &Self) -> Result<Option<Self>> {
        self.check_len("other batch", other.tokens())?;
        if self.active_tokens() == other.active_tokens() {
            return Ok(None);
        }
        let only_here = |row: usize| f32::from(u8::from(self.is_active(row) && !other.is_active(row)));
        let mask: Vec<f32> = (0..self.tokens()).map(only_here).collect();
        self.clone().with_mask(&mask).map(Some)
    }

    /// The mask as numbers `[N]`.
    pub fn mask(&self) -> Vec<f32> {
        self.mask.iter().map(|active| f32::from(u8::from(*active))).collect()
    }
}

#[cfg(test)]
mod tests;
