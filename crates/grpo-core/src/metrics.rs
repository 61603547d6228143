//! Metrics that add up over micro-batches and ranks.

use crate::backend_api::real::Real;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One metric, in a form that can be merged.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// A mean, stored as sum and count.
    Mean {
        /// Sum of the values.
        sum: f64,
        /// Number of values.
        count: f64,
    },
    /// A minimum.
    Min(f64),
    /// A maximum.
    Max(f64),
}

impl Metric {
    /// Returns the number to log; `None` for a mean of no values.
    pub fn value(&self) -> Option<f64> {
        match *self {
            Self::Mean { count: 0.0, .. } => None,
            Self::Mean { sum, count } => Some(sum / count),
            Self::Min(v) | Self::Max(v) => Some(v),
        }
    }

    fn merge(&mut self, other: &Self) {
        match (self, other) {
            (Self::Mean { sum, count }, Self::Mean { sum: s, count: c }) => {
                *sum += s;
                *count += c;
            }
            // `Real::min` and `Real::max` keep NaN; `f64::min` and `f64::max` drop it.
            (Self::Min(a), Self::Min(b)) => *a = Real::min(a, b),
            (Self::Max(a), Self::Max(b)) => *a = Real::max(a, b),
            (a, b) => debug_assert!(false, "one name, two kinds of metric: {a:?} and {b:?}"),
        }
    }
}

/// Named metrics in a stable order. Names are TRL's: `kl`, `entropy`, `clip_ratio/low_mean`, ...
///
/// ```
/// use grpo_core::Metrics;
///
/// let (mut step, mut micro_batch) = (Metrics::default(), Metrics::default());
/// step.mean("entropy", 3.0, 10.0);
/// micro_batch.mean("entropy", 1.0, 10.0);
/// step.merge(&micro_batch);
/// assert_eq!(step.value("entropy"), Some(0.2));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Metrics(BTreeMap<String, Metric>);

impl Metrics {
    /// Adds `sum` over `count` values to the mean called `name`.
    pub fn mean(&mut self, name: &str, sum: f64, count: f64) {
        self.add(name, Metric::Mean { sum, count });
    }

    /// Lowers the minimum called `name`.
    pub fn min(&mut self, name: &str, value: f64) {
        self.add(name, Metric::Min(value));
    }

    /// Raises the maximum called `name`.
    pub fn max(&mut self, name: &str, value: f64) {
        self.add(name, Metric::Max(value));
    }

    /// Merges the metrics of another micro-batch or rank.
    pub fn merge(&mut self, other: &Self) {
        for (name, metric) in &other.0 {
            self.add(name, *metric);
        }
    }

    /// Returns the metric called `name`.
    pub fn get(&self, name: &str) -> Option<&Metric> {
        self.0.get(name)
    }

    /// Returns the value to log of the metric called `name`.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.get(name)?.value()
    }

    /// Iterates over names and values to log, sorted by name; means of no values are omitted.
    pub fn values(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().filter_map(|(name, metric)| Some((name.as_str(), metric.value()?)))
    }

    fn add(&mut self, name: &str, metric: Metric) {
        match self.0.get_mut(name) {
            Some(there) => there.merge(&metric),
            None => {
                self.0.insert(name.to_owned(), metric);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimum_and_maximum_keep_nan() {
        for order in [[f64::NAN, 1.0], [1.0, f64::NAN]] {
            let mut metrics = Metrics::default();
            for value in order {
                metrics.mean("mean", value, 1.0);
                metrics.min("min", value);
                metrics.max("max", value);
            }
            assert!(metrics.values().all(|(_, value)| value.is_nan()), "{metrics:?}");
        }
    }

    #[test]
    fn means_of_micro_batches_are_token_weighted() {
        let mut a = Metrics::default();
        a.mean("kl", 3.0, 1.0);
        a.min("low", 0.5);
        a.max("high", 0.1);
        let mut b = Metrics::default();
        b.mean("kl", 1.0, 3.0);
        b.min("low", 0.25);
        b.max("high", 0.4);
        b.mean("nothing", 0.0, 0.0);
        a.merge(&b);
        assert_eq!(a.values().collect::<Vec<_>>(), [("high", 0.4), ("kl", 1.0), ("low", 0.25)]);
    }
}
