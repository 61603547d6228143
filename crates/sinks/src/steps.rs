//! Steps that have been written.

use std::collections::HashMap;

/// The last step of every series.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps(HashMap<String, u64>);

impl Steps {
    /// Returns `true` if `step` of `series` has not been written. Steps of a series only increase.
    pub(crate) fn lacks(&self, series: &str, step: u64) -> bool {
        self.0.get(series).is_none_or(|last| step > *last)
    }

    pub(crate) fn add(&mut self, series: &str, step: u64) {
        let last = self.0.entry(series.to_owned()).or_insert(step);
        *last = step.max(*last);
    }
}
