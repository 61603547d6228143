//! The wall time of the phases of a step.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Seconds of wall time by phase, by verl's names: `update_weights` (sending them to the engine), `gen` (sampling), `environments` (their
/// answers while nothing is sampled), `reward`, `old_log_prob` and `ref` (scoring), `values`, `adv`, `update_actor` (forward, loss, backward and the optimizer). Phases
/// that a step does not have are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseTimes(BTreeMap<&'static str, f64>);

impl PhaseTimes {
    /// Adds time to a phase.
    pub(crate) fn add(&mut self, phase: &'static str, time: Duration) {
        *self.0.entry(phase).or_default() += time.as_secs_f64();
    }

    /// Makes `time`, which was added to phase `of`, a phase of its own.
    pub(super) fn part(&mut self, phase: &'static str, of: &'static str, time: Duration) {
        *self.0.entry(of).or_default() -= time.as_secs_f64();
        *self.0.entry(phase).or_default() += time.as_secs_f64();
    }

    /// Returns the seconds of a phase.
    pub(super) fn seconds(&self, phase: &str) -> Option<f64> {
        self.0.get(phase).copied()
    }

    /// Calls `work` and adds its time to a phase.
    pub(super) fn time<T>(&mut self, phase: &'static str, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.add(phase, began.elapsed());
        result
    }

    /// Returns the phases and their seconds, as metrics `timing_s/PHASE`.
    pub fn metrics(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        self.0.iter().map(|(phase, seconds)| (format!("timing_s/{phase}"), *seconds))
    }
}
