//! What a value function is trained on.

use super::TokenBatch;
use crate::error::{Error, Result};
use std::ops::Range;

/// Values of the old policy and returns of N tokens, for the value loss of PPO ([`crate::objective::ValueLossConfig`]).
///
/// A value is that of the state before its token: of the hidden states that predict it.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueTargets {
    /// The values when the completions were sampled `[N]`.
    pub old_values: Vec<f32>,
    /// The returns `[N]`, advantage before whitening + old value ([`crate::AdvantageConfig::value_targets`]). NaN says that a token has
    /// none, because its completion has no reward; the value loss leaves it out.
    pub returns: Vec<f32>,
}

impl ValueTargets {
    /// The tokens `rows`.
    pub(super) fn select(&self, rows: Range<usize>) -> Self {
        Self { old_values: self.old_values[rows.clone()].to_vec(), returns: self.returns[rows].to_vec() }
    }
}

impl TokenBatch {
    /// Sets what the values of the tokens should be.
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

    /// What the values of the tokens should be; `None` where no value function is trained.
    pub fn value_targets(&self) -> Option<&ValueTargets> {
        self.value_targets.as_ref()
    }
}
