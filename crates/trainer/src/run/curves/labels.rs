//! Chooses and formats the labels of an axis.

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use std::ops::Range;

/// The minimum space between two adjacent labels in pixels.
const GAP: f64 = 10.0;
/// The maximum number of decimals of a label.
const MOST_DECIMALS: f64 = 6.0;

/// The multiples of a round number along an axis, with their labels.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Labels(Vec<(f64, String)>);

impl Labels {
    /// Returns at most `most` labels in `range`, as many as round numbers allow; integers if `whole`.
    pub(super) fn new(range: &Range<f64>, most: usize, whole: bool) -> Self {
        let half = range.end / 2.0 - range.start / 2.0;
        let power = (half / most.max(1) as f64).log10().floor() - 1.0;
        let power = if whole { power.max(0.0) } else { power };
        for power in (0..=4).map(|more| power + f64::from(more)) {
            for factor in [1.0, 2.0, 5.0] {
                let step = factor * 10f64.powf(power);
                let (first, last) = ((range.start / step - 1e-9).ceil(), (range.end / step + 1e-9).floor());
                if step > 0.0 && step.is_finite() && last - first < most as f64 {
                    let count = (last - first).max(-1.0) as i64 + 1;
                    // Sums of tenths are not exact, and 0 must not have a sign.
                    let values = (0..count).map(|i| rounded((first + i as f64) * step) + 0.0).collect();
                    return Self::written(values, step);
                }
            }
        }
        Self(Vec::new())
    }

    /// Returns as many labels as fit a horizontal axis of this width in pixels; `width` measures a text in pixels.
    pub(super) fn horizontal(range: &Range<f64>, from: f64, pixels: f64, width: impl Fn(&str) -> f64) -> Self {
        let at = |value: f64| pixels * (value - range.start) / (range.end - range.start);
        let fits = |labels: &Self| {
            labels.0.windows(2).all(|pair| {
                let [(a, left), (b, right)] = pair else { return true };
                at(*b) - at(*a) >= (width(left) + width(right)) / 2.0 + GAP
            })
        };
        let most = (pixels / 40.0) as usize;
        let candidates = (1..=most.max(1)).rev().map(|most| Self::new(&(from..range.end), most, true));
        candidates.into_iter().find(fits).unwrap_or(Self(Vec::new()))
    }

    /// Formats the numbers alike: 0.5 and 1.0, 9.5k and 10.0k, 0.5e-6 and 1.0e-6.
    fn written(values: Vec<f64>, step: f64) -> Self {
        let most = values.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        let decimals = |step: f64| (-step.log10() - 1e-9).ceil().clamp(0.0, MOST_DECIMALS) as usize;
        let text = |value: f64| {
            if value == 0.0 {
                return "0".to_owned();
            }
            if !(1e-3..1e15).contains(&most) {
                let power = most.log10().floor() as i32;
                // 10^power is 0 or infinite for the smallest and largest numbers.
                let scaled = |value: f64| value / 10f64.powi(power / 2) / 10f64.powi(power - power / 2);
                return format!("{:.*}e{power}", decimals(scaled(step)), scaled(value));
            }
            let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
            let unit = units.into_iter().find(|(size, _)| most >= 1e4 && most >= *size);
            // Prefers 99999 and 100001 over 99.999k and 100.001k.
            let (size, unit) = unit.filter(|(size, _)| most >= 1e7 || decimals(step / size) <= 2).unwrap_or((1.0, ""));
            format!("{:.*}{unit}", decimals(step / size), value / size)
        };
        Self(values.into_iter().map(|value| (value, text(value))).collect())
    }

    /// Returns the width of the widest label.
    pub(super) fn widest(&self, width: impl Fn(&str) -> f64) -> f64 {
        self.0.iter().map(|(_, text)| width(text)).fold(0.0, f64::max)
    }
}

/// An axis with custom labels.
#[derive(Clone)]
pub(super) struct Labelled {
    axis: RangedCoordf64,
    labels: Labels,
}

impl Labelled {
    pub(super) fn new(range: &Range<f64>, labels: Labels) -> Self {
        Self { axis: range.clone().into(), labels }
    }
}

impl Ranged for Labelled {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.axis.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            return Vec::new();
        }
        self.labels.0.iter().map(|(value, _)| *value).collect()
    }

    fn range(&self) -> Range<f64> {
        self.axis.range()
    }
}

impl ValueFormatter<f64> for Labelled {
    fn format_ext(&self, value: &f64) -> String {
        self.labels.0.iter().find(|(known, _)| known == value).map_or(String::new(), |(_, text)| text.clone())
    }
}

/// Rounds a number to twelve significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.11e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(labels: &Labels) -> Vec<&str> {
        labels.0.iter().map(|(_, text)| text.as_str()).collect()
    }

    #[test]
    fn labels_have_as_many_digits_as_they_need() {
        let of = |range: Range<f64>| Labels::new(&range, 6, false);
        assert_eq!(texts(&of(0.0..1.05)), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(texts(&of(0.0..1e-5)), ["0", "0.2e-5", "0.4e-5", "0.6e-5", "0.8e-5", "1.0e-5"]);
        assert_eq!(texts(&of(0.0..12_500.0)), ["0", "5k", "10k"]);
        assert_eq!(texts(&of(0.999_99..1.000_01)), ["0.999990", "0.999995", "1.000000", "1.000005", "1.000010"]);
        assert_eq!(texts(&of(-4.5e-7..4.5e-7)), ["-4e-7", "-2e-7", "0", "2e-7", "4e-7"]);
        assert_eq!(texts(&of(f64::MIN / 1.1..f64::MAX / 1.1)), ["-1e308", "0", "1e308"]);
        assert_eq!(texts(&of(f64::NAN..1.0)), Vec::<&str>::new());
    }

    #[test]
    fn adjacent_labels_keep_their_distance_at_every_width() {
        for end in [1.0, 2.0, 9.0, 60.0, 1000.0, 99_999.0, 123_456.0, 1e7, 2.5e9, 1e15] {
            for pixels in [200.0, 400.0, 900.0] {
                for character in [4.0, 6.0, 12.0] {
                    let width = |text: &str| character * text.chars().count() as f64;
                    let range = 0.0..1.01 * end;
                    let labels = Labels::horizontal(&range, 0.0, pixels, width);
                    assert!(labels.0.len() >= 2, "{end} on {pixels}: {labels:?}");
                    for pair in labels.0.windows(2) {
                        let space = (pair[1].0 - pair[0].0) / range.end * pixels;
                        let taken = (width(&pair[0].1) + width(&pair[1].1)) / 2.0;
                        assert!(space >= taken + GAP && pair[0].1 != pair[1].1, "{end} on {pixels}: {labels:?}");
                        assert_eq!(pair[0].0.fract(), 0.0, "there is no half of a step");
                    }
                }
            }
        }
    }
}
