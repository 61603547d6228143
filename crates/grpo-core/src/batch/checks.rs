//! Checks of batches, and their error messages.

use super::{LARGEST_LOGP, OP, TokenBatch, TokenWeights};
use crate::backend::Scores;
use crate::config::values::TEMPERATURES;
use crate::error::{Error, Result};

impl TokenBatch {
    /// Checks that every active target is a token id below `vocab`, and every id of the sampling mask at an active token.
    ///
    /// # Errors
    /// [`Error::Value`] that names the first offending position.
    pub fn validate_targets(&self, vocab: usize) -> Result<()> {
        let outside = |i: &usize| usize::try_from(self.targets[*i]).map_or(true, |id| id >= vocab);
        if let Some(i) = self.active.iter().copied().find(outside) {
            let id = self.targets[i];
            let reason = format!("id {id} is outside the vocabulary of {vocab}; mask the position out or fix the id");
            return Err(Error::value("targets", self.position(i), reason));
        }
        // The ids of a token ascend.
        let largest = |i: usize| self.kept(i).and_then(|ids| ids.last().copied());
        let outside = |i: &usize| largest(*i).filter(|id| *id as usize >= vocab).map(|id| (*i, id));
        match self.active.iter().find_map(outside) {
            None => Ok(()),
            Some((i, id)) => {
                let reason = format!("id {id} is outside the vocabulary of {vocab}");
                Err(Error::value("sampling_mask", self.position(i), reason))
            }
        }
    }

    pub(crate) fn check_len(&self, what: &str, found: usize) -> Result<()> {
        if found == self.tokens() {
            return Ok(());
        }
        Err(Error::shape(OP, format!("{what} [N]"), self.tokens(), found))
    }

    /// Checks that `values` `[N]` are possible log-probabilities at the active tokens.
    pub(super) fn check_logps(&self, what: &str, values: &[f32]) -> Result<()> {
        self.check_len(what, values.len())?;
        let illegal = |i: &usize| !(values[*i].is_finite() && values[*i] <= LARGEST_LOGP);
        let Some(i) = self.active.iter().copied().find(illegal) else { return Ok(()) };
        let reason = match values[i] {
            value if value.is_finite() => format!(
                "{value} is no log-probability: a log-probability is at most 0 (natural logarithms; not a probability, a logit \
                 or a negative log-likelihood)"
            ),
            value => format!("{value} is not finite: mask the token, or recompute its log-probability"),
        };
        Err(Error::value(what, self.position(i), reason))
    }

    /// Checks log-probabilities of a sampler like [`Self::check_logps`]; NaN marks an unknown one.
    pub(super) fn check_sampler_logps(&self, values: &[f32]) -> Result<()> {
        self.check_len("sampler_logp", values.len())?;
        let illegal = |i: &usize| values[*i] > LARGEST_LOGP || values[*i] == f32::NEG_INFINITY;
        let Some(i) = self.active.iter().copied().find(illegal) else { return Ok(()) };
        let reason = format!("{} is no log-probability; use NaN for an unknown one", values[i]);
        Err(Error::value("sampler_logp", self.position(i), reason))
    }

    /// Checks computed values `[N]` at the active tokens: log-probabilities and entropies are finite if
    /// the policy's output is.
    pub(crate) fn check_computed(&self, what: &str, values: &[f32]) -> Result<()> {
        self.check_len(what, values.len())?;
        let Some(i) = self.active.iter().copied().find(|i| !values[*i].is_finite()) else { return Ok(()) };
        let reason = match values[i] == f32::NEG_INFINITY {
            true => "-inf: the policy gives the token a probability of 0; its logit is -inf or out of range".to_owned(),
            false => format!(
                "{}: the token's hidden states, the head or its logits are not finite; the policy has diverged, or its \
                 output was not computed",
                values[i]
            ),
        };
        Err(Error::value(what, self.position(i), reason))
    }

    pub(super) fn check_temperatures(&self, values: &[f32]) -> Result<()> {
        self.check_len("temperatures", values.len())?;
        // The bounds in f32: the f32 nearest to 1e-6 is slightly below it.
        let range = *TEMPERATURES.start() as f32..=*TEMPERATURES.end() as f32;
        match self.active.iter().copied().find(|i| !range.contains(&values[*i])) {
            None => Ok(()),
            Some(i) => {
                let reason = format!("{:e} does not lie in [1e-6, 1e6]", values[i]);
                Err(Error::value("temperatures", self.position(i), reason))
            }
        }
    }

    pub(super) fn check_advantages(&self) -> Result<()> {
        for b in 0..self.sequences() {
            for i in self.range(b).filter(|i| self.mask[*i]) {
                if !self.advantage(b, i).is_finite() {
                    let reason = format!("{} is not finite", self.advantage(b, i));
                    return Err(Error::value("advantages", self.position(i), reason));
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_weights(&self, weights: &TokenWeights) -> Result<()> {
        let lists = [
            ("weights.policy", &weights.policy),
            ("weights.kl", &weights.kl),
            ("weights.entropy", &weights.entropy),
            ("weights.nll", &weights.nll),
        ];
        lists.into_iter().try_for_each(|(name, list)| self.check_numbers(name, list))
    }

    /// Checks that there is a log-probability and an entropy for each token.
    pub(crate) fn check_scores(&self, scores: &Scores) -> Result<()> {
        self.check_len("scores.logp", scores.logp.len())?;
        self.check_len("scores.entropy", scores.entropy.len())
    }

    pub(crate) fn check_numbers(&self, name: &str, list: &[f64]) -> Result<()> {
        self.check_len(name, list.len())?;
        match self.active.iter().copied().find(|i| !list[*i].is_finite()) {
            None => Ok(()),
            Some(i) => Err(Error::value(name, self.position(i), format!("{} is not finite", list[i]))),
        }
    }

    /// Returns "token 12 (sequence 1, position 4)".
    pub(crate) fn position(&self, row: usize) -> String {
        // The last sequence that starts at or before the row contains it; empty sequences before it start at the same row.
        let sequence = self.offsets.partition_point(|o| *o <= row) - 1;
        format!("token {row} (sequence {sequence}, position {})", row - self.offsets[sequence])
    }
}
