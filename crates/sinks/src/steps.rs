//! Which steps are written already.

use std::collections::HashMap;

/// The last step of every series.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps(HashMap<String, u64>);

impl Steps {
    /// Whether `series` has no `step` yet. Steps of a series only rise.
    pub(crate) fn lacks(&self, series: &str, step: u64) -> bool {
        self.0.get(series).is_none_or(|last| step > *last)
    }

    /// Takes note of a step that is written.
    pub(crate) fn add(&mut self, series: &str, step: u64) {
        let last = self.0.entry(series.to_owned()).or_insert(step);
        *last = step.max(*last);
    }

    /// Whether nothing was ever written to `series`.
    pub(crate) fn is_new(&self, series: &str) -> bool {
        !self.0.contains_key(series)
    }
}
