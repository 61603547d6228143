//! Axes: their labels, and the pixels of values.

use crate::svg::{Anchor, Point, Svg, text_width};
use std::ops::Range;

/// The font size of labels in pixels.
const SIZE: f64 = 10.0;
/// The minimum space between two adjacent labels in pixels.
const GAP: f64 = 10.0;
/// The maximum number of decimals of a label, and of one with a power of ten.
const MOST_DECIMALS: [usize; 2] = [20, 6];
/// The maximum number of labels of a logarithmic axis of many decades.
const MOST_DECADES: usize = 10;

/// A value of an axis and its text.
pub type Label = (f64, String);

/// An axis: its title, its labels, and a map from values to pixels.
#[derive(Clone, Debug)]
pub struct Axis {
    title: String,
    range: Range<f64>,
    labels: Vec<Label>,
    logarithmic: bool,
    pixels: (f64, f64),
}

impl Axis {
    /// Creates a linear axis.
    pub fn linear(title: &str, range: Range<f64>, labels: Vec<Label>) -> Self {
        Self { title: title.to_owned(), range, labels, logarithmic: false, pixels: (0.0, 1.0) }
    }

    /// Creates a logarithmic axis for the finite ones of `values`, with a margin at both ends. Values below `least`, which is above 0, are
    /// drawn at the start.
    pub fn logarithmic(title: &str, values: impl Iterator<Item = f64>, least: f64) -> Self {
        let (low, high) =
            values.filter(|v| v.is_finite()).fold((f64::INFINITY, least), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low.is_finite() { (low.max(least), high) } else { (1.0, 10.0) };
        // At least a factor of 6, so that there are several labels.
        let range = low / 1.5..(high * 1.5).max(low * 6.0).min(f64::MAX);
        // An axis of few decades has room for more labels.
        let factors: &[f64] = if range.end / range.start < 2e3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let (first, last) = (range.start.log10().floor() as i32, range.end.log10().ceil() as i32);
        let every = ((last - first) as usize).div_ceil(MOST_DECADES).max(1);
        let values =
            (first..=last).step_by(every).flat_map(|decade| factors.iter().map(move |f| f * 10_f64.powi(decade)));
        let labels = values.filter(|value| range.contains(value)).map(|value| (value, three_digits(value))).collect();
        Self { logarithmic: true, ..Self::linear(title, range, labels) }
    }

    /// Sets the pixels of the ends of the axis.
    pub fn between(self, first: f64, last: f64) -> Self {
        Self { pixels: (first, last), ..self }
    }

    /// Returns the pixel of a value.
    pub fn at(&self, value: f64) -> f64 {
        let Range { start, end } = self.range;
        let share = if self.logarithmic {
            (value.max(start) / start).ln() / (end / start).ln()
        } else {
            // Halves, because the range may be wider than the largest number.
            (value / 2.0 - start / 2.0) / (end / 2.0 - start / 2.0)
        };
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }
}

/// Two axes and the area between them.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
}

impl Chart {
    /// Returns the position of a pair of values.
    pub fn at(&self, (x, y): (f64, f64)) -> Point {
        (self.x.at(x), self.y.at(y))
    }

    /// Draws the frame, a grid line and a text for each label, and the titles of the axes.
    pub fn draw(&self, svg: &mut Svg) {
        let ((left, right), (bottom, top)) = (self.x.pixels, self.y.pixels);
        let grid = "stroke=\"#000000\" stroke-opacity=\"0.12\"";
        for (value, text) in &self.x.labels {
            let x = self.x.at(*value);
            svg.line([(x, top), (x, bottom)], grid);
            svg.text(text, (x, bottom + 13.0), SIZE, Anchor::Middle);
        }
        for (value, text) in &self.y.labels {
            let y = self.y.at(*value);
            svg.line([(left, y), (right, y)], grid);
            svg.text(text, (left - 7.0, y), SIZE, Anchor::End);
        }
        svg.rectangle((left, top), (right, bottom), "fill=\"none\" stroke=\"#000000\" stroke-opacity=\"0.4\"");
        svg.text(&self.x.title, (left.midpoint(right), bottom + 30.0), SIZE + 1.0, Anchor::Middle);
        let title_x = left - 19.0 - widest(&self.y.labels);
        svg.vertical_text(&self.y.title, (title_x, top.midpoint(bottom)), SIZE + 1.0);
    }
}

/// Returns at most `most` labels at round numbers in `range`; at integers if `whole`.
pub fn labels(range: &Range<f64>, most: usize, whole: bool) -> Vec<Label> {
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
                return formatted(values, step);
            }
        }
    }
    Vec::new()
}

/// Returns as many labels at integers from `from` as fit a horizontal axis of this width in pixels.
pub fn horizontal_labels(range: &Range<f64>, from: f64, pixels: f64) -> Vec<Label> {
    let at = |value: f64| pixels * (value - range.start) / (range.end - range.start);
    let fits = |labels: &Vec<Label>| {
        labels.windows(2).all(|pair| {
            let [(a, left), (b, right)] = pair else { return true };
            at(*b) - at(*a) >= (text_width(left, SIZE) + text_width(right, SIZE)) / 2.0 + GAP
        })
    };
    let most = ((pixels / 40.0) as usize).max(1);
    let mut candidates = (1..=most).rev().map(|most| labels(&(from..range.end), most, true));
    candidates.find(fits).unwrap_or_default()
}

/// Returns the width of the widest label in pixels.
pub fn widest(labels: &[Label]) -> f64 {
    labels.iter().map(|(_, text)| text_width(text, SIZE)).fold(0.0, f64::max)
}

/// Formats the numbers alike: 0.5 and 1.0, 9.5k and 10.0k, 0.5e-6 and 1.0e-6.
fn formatted(values: Vec<f64>, step: f64) -> Vec<Label> {
    let most = values.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
    let decimals = |step: f64| (-step.log10() - 1e-9).ceil().clamp(0.0, MOST_DECIMALS[0] as f64) as usize;
    let text = |value: f64| {
        if value == 0.0 {
            return "0".to_owned();
        }
        if !(1e-3..1e15).contains(&most) {
            let power = (most.log10() + 1e-12).floor() as i32;
            // 10^power is 0 or infinite for the smallest and largest numbers.
            let scaled = |value: f64| value / 10f64.powi(power / 2) / 10f64.powi(power - power / 2);
            return format!("{:.*}e{power}", decimals(scaled(step)).min(MOST_DECIMALS[1]), scaled(value));
        }
        let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
        let unit = units.into_iter().find(|(size, _)| most >= 1e4 && most >= *size);
        // Prefers 99999 and 100001 over 99.999k and 100.001k.
        let (size, unit) = unit.filter(|(size, _)| most >= 1e7 || decimals(step / size) <= 2).unwrap_or((1.0, ""));
        format!("{:.*}{unit}", decimals(step / size), value / size)
    };
    values.into_iter().map(|value| (value, text(value))).collect()
}

/// Formats a number that is not negative with three digits.
pub fn three_digits(value: f64) -> String {
    let text = match value {
        v if v >= 1e6 => return format!("{v:.2e}").replace(".00e", "e"),
        v if v >= 100.0 => return format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v if v >= 1e-3 || v == 0.0 => format!("{v:.3}"),
        v => return format!("{v:.0e}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Rounds a number to twelve significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.11e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(labels: &[Label]) -> Vec<&str> {
        labels.iter().map(|(_, text)| text.as_str()).collect()
    }

    #[test]
    fn labels_have_as_many_digits_as_they_need() {
        for (range, expected) in [
            (0.0..1.05, &["0", "0.2", "0.4", "0.6", "0.8", "1.0"][..]),
            (0.0..1e-5, &["0", "0.2e-5", "0.4e-5", "0.6e-5", "0.8e-5", "1.0e-5"]),
            (0.0..12_500.0, &["0", "5k", "10k"]),
            (0.999_99..1.000_01, &["0.999990", "0.999995", "1.000000", "1.000005", "1.000010"]),
            (-4.5e-7..4.5e-7, &["-4e-7", "-2e-7", "0", "2e-7", "4e-7"]),
            (f64::MIN / 1.1..f64::MAX / 1.1, &["-1e308", "0", "1e308"]),
            (1e-3..1.000_1e-3, &["0.00100000", "0.00100002", "0.00100004", "0.00100006", "0.00100008", "0.00100010"]),
            (f64::NAN..1.0, &[]),
        ] {
            assert_eq!(texts(&labels(&range, 6, false)), expected, "{range:?}");
        }
    }

    #[test]
    fn adjacent_labels_keep_their_distance_at_every_width() {
        for end in [1.0, 2.0, 9.0, 60.0, 1000.0, 99_999.0, 123_456.0, 1e7, 2.5e9, 1e15] {
            for pixels in [120.0, 200.0, 400.0, 900.0] {
                let range = 0.0..1.01 * end;
                let labels = horizontal_labels(&range, 0.0, pixels);
                assert!(labels.len() >= 2, "{end} on {pixels}: {labels:?}");
                for pair in labels.windows(2) {
                    let space = (pair[1].0 - pair[0].0) / range.end * pixels;
                    let taken = (text_width(&pair[0].1, SIZE) + text_width(&pair[1].1, SIZE)) / 2.0;
                    assert!(space >= taken + GAP && pair[0].1 != pair[1].1, "{end} on {pixels}: {labels:?}");
                    assert_eq!(pair[0].0.fract(), 0.0, "there is no half of a step");
                }
            }
        }
    }

    #[test]
    fn labels_of_logarithmic_axes_are_round_and_in_range() {
        let axis = Axis::logarithmic("", [30.0, 400.0].into_iter(), 1.0).between(0.0, 100.0);
        assert_eq!(texts(&axis.labels), ["20", "50", "100", "200", "500"]);
        assert_eq!((axis.at(axis.range.start), axis.at(axis.range.end), axis.at(0.0)), (0.0, 100.0, 0.0));
        // Axes exist for one value, no value, zero, and values that are not finite.
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -3.0];
        for values in [vec![3.0], vec![], vec![0.0], vec![1e-12, 1e12], odd.to_vec(), vec![1.0, f64::MAX]] {
            let Axis { range, labels, .. } = Axis::logarithmic("", values.iter().copied(), 1.0);
            assert!(range.end > range.start && range.start > 0.0, "{values:?}");
            assert!((1..=13).contains(&labels.len()), "{values:?}: {labels:?}");
            assert!(labels.iter().all(|(_, text)| text.len() <= 7), "{values:?}: {labels:?}");
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        let texts = [1234.4, 81.25, 8.0, 0.25, 0.0, 2e-5, 1e6, 123_456_789.0].map(three_digits);
        assert_eq!(texts, ["1234", "81.2", "8", "0.25", "0", "2e-5", "1e6", "1.23e8"]);
    }
}
