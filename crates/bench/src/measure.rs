//! The numbers of steps of a benchmark, and statistics of their results.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The numbers of steps of every variant.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rounds {
    /// Warm-up steps of every variant after the first call.
    #[default(2)]
    pub warmup: usize,
    /// Timed steps. With 0, variants are only planned and called once.
    #[default(10)]
    pub steps: usize,
}

/// Milliseconds of the timed steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// The time of the fastest step.
    pub min: f64,
    /// The median of the times.
    pub p50: f64,
    /// The 90th percentile of the times.
    pub p90: f64,
    /// The mean of the times.
    pub mean: f64,
    /// The times in order of measurement.
    pub all: Vec<f64>,
}

impl Timing {
    /// Computes statistics of `milliseconds`; `None` if the list is empty.
    pub fn of(milliseconds: Vec<f64>) -> Option<Self> {
        let mut sorted = milliseconds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, count) = (*sorted.first()?, sorted.len());
        // The smallest time that at least this share of the steps does not exceed.
        let quantile = |share: f64| sorted[((share * count as f64).ceil() as usize).clamp(1, count) - 1];
        let (p50, p90) = (quantile(0.5), quantile(0.9));
        Some(Self { min, p50, p90, mean: milliseconds.iter().sum::<f64>() / count as f64, all: milliseconds })
    }
}

/// A number that was measured in several rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The smallest number.
    pub min: f64,
    /// The median; the mean of the middle two of an even number of rounds.
    pub median: f64,
    /// The largest number.
    pub max: f64,
    /// The numbers in order of measurement.
    pub all: Vec<f64>,
}

impl Spread {
    /// Computes the statistics of `numbers`; `None` if there are none.
    pub fn of(numbers: Vec<f64>) -> Option<Self> {
        let mut sorted = numbers.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let median = sorted[(sorted.len() - 1) / 2].midpoint(sorted[sorted.len() / 2]);
        Some(Self { min, median, max, all: numbers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_times() {
        assert_eq!(Timing::of(vec![]), None);
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]).expect("steps");
        assert_eq!((timing.min, timing.p50, timing.p90, timing.mean), (1.0, 2.0, 4.0, 2.5));
        let ten = Timing::of((1..=10).map(f64::from).collect()).expect("steps");
        assert_eq!((ten.p50, ten.p90), (5.0, 9.0));
    }
    #[test]
    fn a_spread_has_the_middle_and_both_ends() {
        assert_eq!(Spread::of(vec![]), None);
        let of = |numbers: &[f64]| Spread::of(numbers.to_vec()).map(|s| (s.min, s.median, s.max));
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some((1.0, 2.0, 3.0)));
        assert_eq!(of(&[8.0, 1.0, 2.0, 4.0]), Some((1.0, 3.0, 8.0)));
        assert_eq!(of(&[5.0]), Some((5.0, 5.0, 5.0)));
    }
}
