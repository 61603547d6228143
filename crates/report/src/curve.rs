//! Reduces curves to a number of points that a page can show.
//!
//! A longer series is cut into buckets of equally many rows, each with its mean, minimum and maximum: extremes are kept, and an average
//! over buckets is an average over rows.

use serde_json::{Map, Value, json};

/// A value of a metric at a step; `None` for null in the log, which stands for NaN and infinities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub step: u64,
    pub value: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bucket {
    pub first: u64,
    pub last: u64,
    /// Mean, minimum and maximum of the finite values.
    pub values: Option<(f64, f64, f64)>,
}

/// Cuts `points` into at most `most` buckets.
pub(crate) fn buckets(points: &[Point], most: usize) -> Vec<Bucket> {
    points.chunks(points.len().div_ceil(most.max(1)).max(1)).map(Bucket::of).collect()
}

impl Bucket {
    fn of(points: &[Point]) -> Self {
        let finite: Vec<f64> = points.iter().filter_map(|point| point.value).collect();
        let count = finite.len() as f64;
        // Divided before summing, because the sum of large values may overflow.
        let mean = finite.iter().map(|value| value / count).sum::<f64>();
        let low = finite.iter().copied().fold(f64::INFINITY, f64::min);
        let high = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self {
            first: points.first().map_or(0, |point| point.step),
            last: points.last().map_or(0, |point| point.step),
            values: (!finite.is_empty()).then_some((mean, low, high)),
        }
    }
}

/// Returns the steps of the buckets for the page's script: `first`, and `last` if buckets have several rows.
pub(crate) fn steps_json(buckets: &[Bucket]) -> Value {
    let first: Vec<u64> = buckets.iter().map(|bucket| bucket.first).collect();
    if buckets.iter().all(|bucket| bucket.first == bucket.last) {
        return json!({ "first": first });
    }
    json!({ "first": first, "last": buckets.iter().map(|bucket| bucket.last).collect::<Vec<_>>() })
}

/// Returns the values of the buckets: `mean`, and `low` and `high` if they differ from it.
pub(crate) fn values_json(buckets: &[Bucket]) -> Map<String, Value> {
    let pick = |of: fn((f64, f64, f64)) -> f64| -> Value {
        buckets.iter().map(|bucket| bucket.values.map(|values| short(of(values)))).collect::<Vec<_>>().into()
    };
    let mut json = Map::from_iter([("mean".to_owned(), pick(|(mean, _, _)| mean))]);
    if buckets.iter().any(|bucket| bucket.values.is_some_and(|(_, low, high)| low != high)) {
        json.insert("low".to_owned(), pick(|(_, low, _)| low));
        json.insert("high".to_owned(), pick(|(_, _, high)| high));
    }
    json
}

/// Rounds a number to six significant digits, more than a screen can show.
pub(crate) fn short(value: f64) -> f64 {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return value;
    }
    // Rounding up the largest numbers overflows f64.
    format!("{value:.5e}").parse().ok().filter(|v: &f64| v.is_finite()).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: impl IntoIterator<Item = Option<f64>>) -> Vec<Point> {
        values.into_iter().zip(1..).map(|(value, step)| Point { step, value }).collect()
    }

    #[test]
    fn short_curves_are_kept_point_by_point() {
        let buckets = buckets(&points([Some(1.0), None, Some(3.0)]), 3);
        assert_eq!(buckets.len(), 3);
        assert_eq!(buckets[1], Bucket { first: 2, last: 2, values: None });
        assert_eq!(steps_json(&buckets), json!({ "first": [1, 2, 3] }));
        assert_eq!(Value::Object(values_json(&buckets)), json!({ "mean": [1.0, null, 3.0] }));
    }

    #[test]
    fn long_curves_keep_their_extremes_and_their_mean() {
        let mut values: Vec<f64> = (0..10_007).map(|i| f64::from(i % 10)).collect();
        (values[4321], values[10_006]) = (1e6, -7.0);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let points = points(values.iter().copied().map(Some));
        let buckets = buckets(&points, 100);
        assert!(buckets.len() <= 100 && buckets.len() > 90, "{}", buckets.len());
        assert_eq!((buckets[0].first, buckets.last().unwrap().last), (1, 10_007));
        assert!(buckets.windows(2).all(|pair| pair[0].last + 1 == pair[1].first));
        let extremes =
            buckets.iter().filter_map(|b| b.values).fold((0.0f64, 0.0f64), |e, v| (e.0.min(v.1), e.1.max(v.2)));
        assert_eq!(extremes, (-7.0, 1e6));
        let weighted = |b: &Bucket| b.values.unwrap().0 * (b.last - b.first + 1) as f64;
        let again = buckets.iter().map(weighted).sum::<f64>() / points.len() as f64;
        assert!((again - mean).abs() < 1e-9 * mean, "{again} {mean}");
        assert!(values_json(&buckets).contains_key("low") && steps_json(&buckets)["last"][0] == json!(101));
    }

    #[test]
    fn numbers_are_short_and_stay_finite() {
        assert_eq!([0.515_624_97, 127_852.0, 1e-300, 3.0].map(short), [0.515_625, 127_852.0, 1e-300, 3.0]);
        assert!(short(f64::MAX).is_finite() && short(f64::MIN).is_finite());
        assert!(Bucket::of(&points([Some(f64::MAX); 4])).values.unwrap().0.is_finite());
        assert!(buckets(&[], 10).is_empty());
    }
}
