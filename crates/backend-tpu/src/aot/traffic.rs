//! Bytes that the collectives of a compiled program move between devices.

use crate::error::failed;
use grpo_core::error::Result;
use grpo_pjrt::Executable;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes that each device receives in collectives, by XLA's name of the collective (see
/// [`grpo_pjrt::Collective::received_bytes`]). Empty for a program of one device. Loops that the compiler adds, such as the
/// ring of a product with a gathered weight, count once, as in its estimates of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Traffic(BTreeMap<String, f64>);

impl Traffic {
    /// Reads the collectives of `executable` for this number of devices, with loop bodies counted once; empty if the
    /// plugin does not return the program as HLO.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the plugin fails.
    pub(super) fn of(executable: &Executable, devices: usize) -> Result<Self> {
        let mut all = Self::default();
        if devices > 1 {
            for collective in executable.collectives().map_err(failed)?.unwrap_or_default() {
                *all.0.entry(collective.kind.clone()).or_default() += collective.received_bytes(devices);
            }
        }
        Ok(all)
    }

    /// Returns the bytes by kind.
    pub fn by_kind(&self) -> &BTreeMap<String, f64> {
        &self.0
    }

    /// Returns the bytes of all collectives.
    pub fn bytes(&self) -> f64 {
        self.0.values().sum()
    }

    /// Returns this plus `count` times the difference of `more` and `less`.
    #[must_use]
    pub(super) fn plus_difference(mut self, more: &Self, less: &Self, count: f64) -> Self {
        for (traffic, factor) in [(more, count), (less, -count)] {
            for (kind, bytes) in &traffic.0 {
                *self.0.entry(kind.clone()).or_default() += factor * bytes;
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_of_loop_bodies_count_once_per_iteration() {
        let traffic = |pairs: &[(&str, f64)]| Traffic(pairs.iter().map(|(k, b)| ((*k).into(), *b)).collect());
        // A body of 10 bytes with 4 iterations, and 1 byte outside.
        let once = traffic(&[("all-gather", 11.0)]);
        let twice = traffic(&[("all-gather", 21.0), ("all-reduce", 2.0)]);
        let all = once.clone().plus_difference(&twice, &once, 3.0);
        assert_eq!(all, traffic(&[("all-gather", 41.0), ("all-reduce", 6.0)]));
        assert_eq!(all.bytes(), 47.0);
    }
}
