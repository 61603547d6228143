//! Plot of time against memory, with a point per variant and a panel per problem; both axes are logarithmic.
//!
//! Names are in a list next to each panel, ordered by time. At the points, names of similar variants would overlap.

use super::report::{Case, Document, Measured, Outcome};
use grpo_plot::{Anchor, Axis, Chart, Svg, shortened, three_digits};
use std::collections::BTreeSet;
use std::ops::Range;

const WIDTH: u32 = 1080;
/// Left, right, top and bottom margin of the chart within its panel; the list is on its right.
const FRAME: [f64; 4] = [78.0, 600.0, 44.0, 60.0];
const LINE: f64 = 21.0;
const MIB: f64 = (1 << 20) as f64;

struct Point {
    name: String,
    /// The index of the marker, equal in every panel.
    index: usize,
    /// Memory in addition to inputs and outputs.
    mib: f64,
    milliseconds: f64,
}

/// Draws the plot as an SVG document.
pub fn svg(document: &Document) -> String {
    let names: BTreeSet<&str> =
        document.cases.iter().flat_map(|case| case.variants.keys().map(String::as_str)).collect();
    let panels: Vec<(&Case, Vec<Point>)> = document.cases.iter().map(|case| (case, points(case, &names))).collect();
    let height = |points: &[Point]| FRAME[2] + FRAME[3] + (LINE * (points.len() + 2) as f64).max(300.0);
    let total: f64 = panels.iter().map(|(_, points)| height(points)).sum();
    let (mut svg, mut top) = (Svg::new(WIDTH, total.max(1.0) as u32), 0.0);
    for (case, points) in &panels {
        panel(&mut svg, case, points, top..top + height(points));
        top += height(points);
    }
    svg.finish()
}

/// Returns the variants and peers that have a time and a memory, fastest first.
fn points(case: &Case, names: &BTreeSet<&str>) -> Vec<Point> {
    let memory = |measured: &Measured| measured.bytes.high_water.or(measured.bytes.planned.workspace);
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

fn panel(svg: &mut Svg, case: &Case, points: &[Point], Range { start, end }: Range<f64>) {
    let [left, right, top, below] = FRAME;
    let (top, bottom) = (start + top, end - below);
    let (shape, dtype) = (case.config.shape, case.config.dtype.name());
    let hidden = shape.hidden.map(|hidden| format!(" H {hidden}")).unwrap_or_default();
    let title = format!("{}: N {}{hidden} V {}, {dtype}", case.name, shape.rows(), shape.vocab);
    svg.text(&title, (left, start + 22.0), 15.0, Anchor::Start);
    // At least one page and one microsecond: 0 has no logarithm.
    let x = Axis::logarithmic("memory beyond inputs and gradients (MiB)", points.iter().map(|p| p.mib), 1.0 / 256.0);
    let y = Axis::logarithmic("median step (ms)", points.iter().map(|p| p.milliseconds), 1e-3);
    let chart = Chart { x: x.between(left, right), y: y.between(bottom, top) };
    chart.draw(svg);
    if points.is_empty() {
        svg.text("nothing was timed", (left.midpoint(right), top.midpoint(bottom)), 14.0, Anchor::Middle);
    }
    let columns = [right + 48.0, right + 352.0, right + 452.0];
    let row = |svg: &mut Svg, y: f64, [name, time, memory]: [&str; 3], size| {
        svg.text(name, (columns[0], y), size, Anchor::Start);
        svg.text(time, (columns[1], y), size, Anchor::End);
        svg.text(memory, (columns[2], y), size, Anchor::End);
    };
    row(svg, top, ["variant", "ms", "MiB"], 11.0);
    for (i, point) in points.iter().enumerate() {
        svg.marker(chart.at((point.mib, point.milliseconds)), point.index);
        let y = top + LINE * (i + 1) as f64;
        svg.marker((right + 30.0, y), point.index);
        let (time, memory) = (three_digits(point.milliseconds), three_digits(point.mib));
        row(svg, y, [&shortened(&point.name, 30), &time, &memory], 12.0);
    }
}
