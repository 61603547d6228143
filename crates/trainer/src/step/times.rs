//! Wall time of the phases of a step.

use std::collections::BTreeMap;
use std::time::Instant;

/// Seconds of wall time by phase, by verl's names: `gen` (sampling), `reward`, `old_log_prob` and `ref` (scoring), `values`, `adv`,
/// `update_actor` (forward, loss, backward and the optimizer). Phases that a step does not have are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseTimes(BTreeMap<&'static str, f64>);

impl PhaseTimes {
    /// Adds the time since `began` to a phase.
    pub(super) fn add(&mut self, phase: &'static str, began: Instant) {
        *self.0.entry(phase).or_default() += began.elapsed().as_secs_f64();
    }

    /// Returns the phases and their seconds, as metrics `timing_s/PHASE`.
    pub fn metrics(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        self.0.iter().map(|(phase, seconds)| (format!("timing_s/{phase}"), *seconds))
    }
}
