//! How long the phases of a step take.

use std::collections::BTreeMap;
use std::time::Instant;

/// Seconds of wall time by phase, under verl's names: `gen` (sampling), `reward`, `old_log_prob` and `ref` (scoring), `values`, `adv`,
/// `update_actor` (forward, loss, backward and the optimizer). Phases that a step does not have are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseTimes(BTreeMap<&'static str, f64>);

impl PhaseTimes {
    /// Adds what has passed since `began` to a phase.
    pub(super) fn add(&mut self, phase: &'static str, began: Instant) {
        *self.0.entry(phase).or_default() += began.elapsed().as_secs_f64();
    }

    /// The phases and their seconds, as metrics `timing_s/PHASE`.
    pub fn metrics(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        self.0.iter().map(|(phase, seconds)| (format!("timing_s/{phase}"), *seconds))
    }
}
