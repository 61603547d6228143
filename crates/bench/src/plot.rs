//! Plot of time against memory, with a point per variant and a panel per problem; both axes are logarithmic.
//!
//! Names are in a list next to each panel, ordered by time. At the points, names of similar variants would overlap.

use super::report::{Case, Document, Measured, Outcome};
use crate::error::{Error, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::collections::BTreeSet;

const FONT: &str = "sans-serif";
const WIDTH: u32 = 1080;
/// Left, right, top and bottom of the drawing within its panel; the list is on its right.
const FRAME: [i32; 4] = [78, 600, 44, 60];
const LINE: i32 = 21;
const MIB: f64 = (1 << 20) as f64;

// Okabe and Ito's palette, which colour-blind readers can distinguish; each cycle through it has its own marker shape.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(150, 130, 0),
    RGBColor(60, 60, 60),
];

struct Point {
    name: String,
    /// The index of the marker, equal in every panel.
    index: usize,
    /// Memory in addition to inputs and outputs.
    mib: f64,
    milliseconds: f64,
}

/// Draws the plot as an SVG document.
///
/// # Errors
/// [`Error::Text`] for an error of the drawing library.
pub fn svg(document: &Document) -> Result<String> {
    let names: BTreeSet<&str> =
        document.cases.iter().flat_map(|case| case.variants.keys().map(String::as_str)).collect();
    let panels: Vec<(&Case, Vec<Point>)> = document.cases.iter().map(|case| (case, points(case, &names))).collect();
    let heights: Vec<u32> = panels.iter().map(|(_, points)| height(points.len())).collect();
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, heights.iter().sum::<u32>().max(1))).into_drawing_area();
        let drawn = root.fill(&WHITE).map_err(|e| e.to_string()).and_then(|()| {
            let mut rest = root.clone();
            for ((case, points), height) in panels.iter().zip(&heights) {
                let (area, below) = rest.split_vertically(*height);
                rest = below;
                panel(&area, case, points, *height as i32).map_err(|e| e.to_string())?;
            }
            root.present().map_err(|e| e.to_string())
        });
        drawn.map_err(|e| Error::Text(format!("plot: {e}")))?;
    }
    Ok(text)
}

fn height(points: usize) -> u32 {
    (FRAME[2] + FRAME[3]) as u32 + (LINE as u32 * (points as u32 + 2)).max(300)
}

/// Returns the variants and peers that have a time and a memory, fastest first.
fn points(case: &Case, names: &BTreeSet<&str>) -> Vec<Point> {
    let memory = |measured: &Measured| measured.bytes.high_water.or(measured.bytes.workspace);
    let point = |(name, outcome): (&String, &Outcome)| match outcome {
        Outcome::Measured(measured) => Some(Point {
            name: name.clone(),
            index: names.iter().take_while(|other| **other != name.as_str()).count(),
            mib: memory(measured)? as f64 / MIB,
            milliseconds: measured.step_ms.as_ref()?.p50,
        }),
        _ => None,
    };
    let mut points: Vec<Point> = case.variants.iter().filter_map(point).collect();
    points.sort_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds));
    points
}

/// A logarithmic axis. Values below its start are drawn at its start.
struct Axis {
    start: f64,
    end: f64,
    pixels: (i32, i32),
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, least: f64, pixels: (i32, i32)) -> Self {
        let (low, high) =
            values.filter(|v| v.is_finite()).fold((f64::INFINITY, least), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low.is_finite() { (low.max(least), high) } else { (1.0, 10.0) };
        // Margins at both ends, and room for more than one tick.
        let (start, end) = (low / 1.5, (high * 1.5).max(low * 6.0).min(f64::MAX));
        Self { start, end, pixels }
    }

    fn at(&self, value: f64) -> i32 {
        let share = (value.max(self.start) / self.start).ln() / (self.end / self.start).ln();
        self.pixels.0 + (share * f64::from(self.pixels.1 - self.pixels.0)).round() as i32
    }

    fn ticks(&self) -> Vec<f64> {
        let decades = self.start.log10().floor() as i32..=self.end.log10().ceil() as i32;
        // An axis of few decades has room for more ticks.
        let steps: &[f64] = if self.end / self.start < 2e3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let ticks = decades.flat_map(|decade| steps.iter().map(move |step| step * 10_f64.powi(decade)));
        ticks.filter(|tick| (self.start..=self.end).contains(tick)).collect()
    }
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn panel(area: &Area<'_>, case: &Case, points: &[Point], height: i32) -> Drawn {
    let [left, right, top, below] = FRAME;
    let bottom = height - below;
    let style = |size: i32, h, v| (FONT, size).into_font().color(&BLACK.mix(0.85)).pos(Pos::new(h, v));
    let write = |text: &str, at: (i32, i32), size, h, v| area.draw(&Text::new(text.to_owned(), at, style(size, h, v)));
    let (shape, dtype) = (case.config.shape, case.config.dtype.name());
    let hidden = shape.hidden.map(|hidden| format!(" H {hidden}")).unwrap_or_default();
    let title = format!("{}: N {}{hidden} V {}, {dtype}", case.name, shape.rows(), shape.vocab);
    write(&title, (left, 14), 17, HPos::Left, VPos::Top)?;
    // At least one page and one microsecond: 0 has no logarithm.
    let x = Axis::new(points.iter().map(|p| p.mib), 1.0 / 256.0, (left, right));
    let y = Axis::new(points.iter().map(|p| p.milliseconds), 1e-3, (bottom, top));
    let line = |from: (i32, i32), to: (i32, i32), ink: f64| {
        area.draw(&PathElement::new(vec![from, to], BLACK.mix(ink).stroke_width(1)))
    };
    for tick in x.ticks() {
        line((x.at(tick), top), (x.at(tick), bottom), 0.12)?;
        write(&number(tick), (x.at(tick), bottom + 6), 12, HPos::Center, VPos::Top)?;
    }
    for tick in y.ticks() {
        line((left, y.at(tick)), (right, y.at(tick)), 0.12)?;
        write(&number(tick), (left - 7, y.at(tick)), 12, HPos::Right, VPos::Center)?;
    }
    area.draw(&Rectangle::new([(left, top), (right, bottom)], BLACK.mix(0.5).stroke_width(1)))?;
    let below_axis = ((left + right) / 2, bottom + 30);
    write("memory beyond inputs and gradients (MiB)", below_axis, 13, HPos::Center, VPos::Top)?;
    let turned = (FONT, 13).into_font().transform(FontTransform::Rotate270).color(&BLACK.mix(0.85));
    let beside_axis = (left - 62, (top + bottom) / 2);
    area.draw(&Text::new("median step (ms)", beside_axis, turned.pos(Pos::new(HPos::Center, VPos::Top))))?;

    let list = [right + 30, right + 48, right + 352, right + 452];
    write("variant", (list[1], top), 12, HPos::Left, VPos::Center)?;
    write("ms", (list[2], top), 12, HPos::Right, VPos::Center)?;
    write("MiB", (list[3], top), 12, HPos::Right, VPos::Center)?;
    if points.is_empty() {
        write("nothing was timed", ((left + right) / 2, (top + bottom) / 2), 14, HPos::Center, VPos::Center)?;
    }
    for (i, point) in points.iter().enumerate() {
        marker(area, (x.at(point.mib), y.at(point.milliseconds)), point.index)?;
        let at = top + LINE * (i as i32 + 1);
        marker(area, (list[0], at), point.index)?;
        write(&short(&point.name), (list[1], at), 13, HPos::Left, VPos::Center)?;
        write(&number(point.milliseconds), (list[2], at), 13, HPos::Right, VPos::Center)?;
        write(&number(point.mib), (list[3], at), 13, HPos::Right, VPos::Center)?;
    }
    Ok(())
}

fn marker(area: &Area<'_>, (x, y): (i32, i32), index: usize) -> Drawn {
    let color = COLORS[index % COLORS.len()];
    match index / COLORS.len() % 4 {
        0 => area.draw(&Circle::new((x, y), 6, color.filled()))?,
        1 => area.draw(&Rectangle::new([(x - 5, y - 5), (x + 5, y + 5)], color.filled()))?,
        2 => area.draw(&TriangleMarker::new((x, y), 7, color.filled()))?,
        _ => area.draw(&Cross::new((x, y), 5, color.stroke_width(3)))?,
    }
    Ok(())
}

/// Shortens a name to fit the list.
fn short(name: &str) -> String {
    const MOST: usize = 30;
    match name.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// Formats a number with three digits.
fn number(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => trimmed(format!("{v:.1}")),
        v if v >= 1.0 => trimmed(format!("{v:.2}")),
        v => trimmed(format!("{v:.3}")),
    }
}

fn trimmed(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_their_axis() {
        let axis = Axis::new([30.0, 400.0].into_iter(), 1.0, (0, 100));
        assert_eq!(axis.ticks(), [20.0, 50.0, 100.0, 200.0, 500.0]);
        assert_eq!((axis.at(axis.start), axis.at(axis.end), axis.at(0.0)), (0, 100, 0));
        // Axes exist for one value, no value, zero, and values that are not finite.
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -3.0];
        for values in [vec![3.0], vec![], vec![0.0], vec![1e-12, 1e12], odd.to_vec(), vec![1.0, f64::MAX]] {
            let axis = Axis::new(values.clone().into_iter(), 1.0, (0, 100));
            assert!(axis.end > axis.start && axis.start > 0.0 && !axis.ticks().is_empty(), "{values:?}");
        }
    }

    #[test]
    fn plot_numbers_have_three_digits() {
        assert_eq!([1234.4, 81.25, 8.0, 0.25, 0.0].map(number), ["1234", "81.2", "8", "0.25", "0"]);
    }
}
