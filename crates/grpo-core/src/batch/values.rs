//! Training targets of a value function.

use super::TokenBatch;
use crate::error::{Error, Result};
use std::ops::Range;

/// Values of the old policy and returns of N tokens, for the value loss of PPO ([`crate::objective::ValueLossConfig`]).
///
/// A value belongs to the state before its token, given by the hidden states that predict the token.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueTargets {
    /// The values when the completions were sampled `[N]`.
    pub old_values: Vec<f32>,
    /// The returns `[N]`: advantage before whitening + old value ([`crate::AdvantageConfig::value_targets`]). NaN marks a token without a
    /// return, because its completion has no reward; the value loss skips it.
    pub returns: Vec<f32>,
}

impl ValueTargets {
    /// Returns the targets of the tokens `rows`.
    pub(super) fn select(&self, rows: Range<usize>) -> Self {
        Self { old_values: self.old_values[rows.clone()].to_vec(), returns: self.returns[rows].to_vec() }
    }
}

impl TokenBatch {
    /// Sets the value targets of the tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length, [`Error::Value`] for an old value that is not finite, or a return that is infinite, at an active
    /// token.
    pub fn with_value_targets(mut self, targets: ValueTargets) -> Result<Self> {
        let ValueTargets { old_values, returns } = &targets;
        for (name, list, nan) in [("old_values", old_values, false), ("returns", returns, true)] {
            self.check_len(name, list.len())?;
            let illegal = |i: &usize| !(list[*i].is_finite() || nan && list[*i].is_nan());
            if let Some(i) = self.active_rows().iter().copied().find(illegal) {
                return Err(Error::value(name, self.position(i), format!("{} is not finite", list[i])));
            }
        }
        self.value_targets = Some(targets);
        Ok(self)
    }

    /// Returns the value targets of the tokens; `None` if no value function is trained.
    pub fn value_targets(&self) -> Option<&ValueTargets> {
        self.value_targets.as_ref()
    }
}
