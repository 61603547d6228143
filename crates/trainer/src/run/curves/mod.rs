//! Draws curves.svg, an overview of a run.
//!
//! The first panel shows the whole run: GRPO steps, and the warm-up left of 0. The warm-up always gets the same share of the width,
//! because it may have many more (and much shorter) steps. Each other panel shows one phase.

mod labels;

use super::jsonl::{MetricsRow, RowKind};
use crate::error::{Error, Result};
use grpo_files::noun;
use labels::{Labelled, Labels};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ops::Range;

// The colour-blind safe palette of Okabe and Ito.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILLION: RGBColor = RGBColor(213, 94, 0);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const PURPLE: RGBColor = RGBColor(148, 80, 140);
const GREY: RGBColor = RGBColor(110, 110, 110);
const FONT: &str = "sans-serif";

/// One line in a panel.
struct Curve {
    label: &'static str,
    color: RGBColor,
    points: Vec<(f64, f64)>,
    /// `true` for few exact points (evaluations), drawn as dots; `false` for many noisy ones, drawn as their moving average.
    exact: bool,
}

struct Panel {
    title: &'static str,
    /// Unit of the vertical axis.
    unit: &'static str,
    curves: Vec<Curve>,
    /// Values that the vertical axis always includes.
    floor: Option<Range<f64>>,
    /// The steps that the horizontal axis shows.
    span: Span,
}

#[derive(Clone, Copy, PartialEq)]
enum Span {
    Whole,
    Warmup,
    Grpo,
}

/// The share of the whole run's panel that the warm-up takes, relative to the width of GRPO.
const WARMUP_SHARE: f64 = 0.2;

/// The numbers of steps of the horizontal axes.
struct Axis {
    warmup: f64,
    grpo: f64,
}

impl Axis {
    fn range(&self, span: Span) -> Range<f64> {
        match span {
            Span::Whole if self.warmup > 0.0 => -WARMUP_SHARE * self.grpo..1.01 * self.grpo,
            Span::Whole | Span::Grpo => 0.0..1.01 * self.grpo,
            Span::Warmup => 0.0..1.01 * self.warmup.max(1.0),
        }
    }

    fn description(&self, span: Span) -> String {
        match span {
            Span::Whole if self.warmup > 0.0 => {
                format!("GRPO step (left of 0: {} {})", self.warmup, noun(self.warmup as u64, "warm-up step"))
            }
            Span::Whole | Span::Grpo => "GRPO step".to_owned(),
            Span::Warmup => "warm-up step".to_owned(),
        }
    }
}

fn curve(rows: &[MetricsRow], kind: RowKind, metric: &str, label: &'static str, color: RGBColor) -> Curve {
    let of_kind = rows.iter().filter(|row| row.phase == kind);
    let points = of_kind.filter_map(|row| Some((row.step as f64, row.get(metric)?))).collect();
    Curve { label, color, points, exact: kind == RowKind::Eval }
}

/// Draws the curves of a run as an SVG document.
///
/// # Errors
/// [`Error::Text`] if the drawing library fails.
pub fn svg(name: &str, rows: &[MetricsRow]) -> Result<String> {
    let mut text = String::new();
    draw(name, rows, &mut text).map_err(|e| Error::Text(format!("curves: {e}")))?;
    Ok(text)
}

type DrawResult<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn draw(name: &str, rows: &[MetricsRow], text: &mut String) -> DrawResult {
    let last = |kind| rows.iter().filter(|r| r.phase == kind).map(|r| r.step).max().unwrap_or(0) as f64;
    let axis = Axis { warmup: last(RowKind::Warmup), grpo: last(RowKind::Grpo).max(1.0) };

    let mut panels = details(rows);
    // Panels without data are dropped.
    panels.retain(|panel| panel.curves.iter().any(|curve| !curve.points.is_empty()));
    let lines = panels.len().div_ceil(2);
    let root = SVGBackend::with_string(text, (1000, 380 + 250 * lines as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.titled(&shortened(name), (FONT, 24).into_font().color(&BLACK))?;
    let (top, below) = root.split_vertically(340);
    draw_panel(&top, &outcome(&axis, rows), &axis)?;
    for (area, panel) in below.split_evenly((lines.max(1), 2)).iter().zip(&panels) {
        draw_panel(area, panel, &axis)?;
    }
    root.present()?;
    Ok(())
}

fn outcome(axis: &Axis, rows: &[MetricsRow]) -> Panel {
    // The warm-up has no rewards; its likelihood per answer token is a share, too.
    let mut learned = curve(rows, RowKind::Warmup, "loss", "warm-up: likelihood per answer token", GREY);
    for (x, y) in &mut learned.points {
        *x = WARMUP_SHARE * axis.grpo * (*x / axis.warmup - 1.0);
        *y = (-*y).exp();
    }
    let evaluated = rows.iter().any(|row| row.phase == RowKind::Eval);
    Panel {
        title: if evaluated { "reward and held-out pass@1" } else { "reward" },
        unit: "share, reward",
        curves: vec![
            learned,
            curve(rows, RowKind::Grpo, "reward", "reward of training samples", BLUE),
            curve(rows, RowKind::Eval, "eval/reward", "held-out reward (sampled)", GREEN),
            curve(rows, RowKind::Eval, "eval/pass@1", "held-out pass@1", VERMILLION),
        ],
        floor: Some(0.0..1.0),
        span: Span::Whole,
    }
}

fn details(rows: &[MetricsRow]) -> Vec<Panel> {
    let span = Span::Grpo;
    let grpo = |metric, label, color| curve(rows, RowKind::Grpo, metric, label, color);
    let has = |metric: &str| rows.iter().any(|r| r.phase == RowKind::Grpo && r.get(metric).is_some());
    let drift = if has("kl") {
        let curves = vec![grpo("kl", "KL to the reference", VERMILLION)];
        Panel { title: "KL(policy || reference)", unit: "nats / token", curves, floor: Some(0.0..0.0), span }
    } else {
        let curves = vec![grpo("grad_norm", "norm before clipping", VERMILLION)];
        Panel { title: "gradient norm", unit: "2-norm", curves, floor: Some(0.0..0.0), span }
    };
    let clipped = if has("cispo_clip_ratio") {
        vec![grpo("cispo_clip_ratio", "capped", PURPLE)]
    } else {
        vec![
            grpo("clip_ratio/high_mean", "above 1 + epsilon_high", PURPLE),
            grpo("clip_ratio/low_mean", "below 1 - epsilon_low", GREY),
        ]
    };
    let percent = |metric, label, color| {
        let mut curve = grpo(metric, label, color);
        curve.points.iter_mut().for_each(|(_, share)| *share *= 100.0);
        curve
    };
    vec![
        Panel {
            title: "warm-up: cross-entropy of answers",
            unit: "nats / token",
            curves: vec![curve(rows, RowKind::Warmup, "loss", "supervised loss", GREY)],
            floor: Some(0.0..0.0),
            span: Span::Warmup,
        },
        Panel { title: "GRPO loss", unit: "loss", curves: vec![grpo("loss", "loss", BLUE)], floor: None, span },
        Panel {
            title: "entropy of the policy",
            unit: "nats / token",
            curves: vec![grpo("entropy", "entropy", GREEN)],
            floor: Some(0.0..0.0),
            span,
        },
        drift,
        Panel { title: "clip ratio", unit: "share of tokens", curves: clipped, floor: Some(0.0..0.01), span },
        Panel {
            title: "groups without a signal, completions cut off",
            unit: "%",
            curves: vec![
                percent("frac_reward_zero_std", "groups with equal rewards", BLUE),
                percent("completions/clipped_ratio", "completions cut off", VERMILLION),
            ],
            floor: Some(0.0..100.0),
            span,
        },
    ]
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel, axis: &Axis) -> DrawResult {
    let (x, y, large) = (axis.range(panel.span), vertical(panel), panel.span == Span::Whole);
    let titled = area.titled(panel.title, (FONT, if large { 18 } else { 15 }))?;
    let drawn: Vec<&Curve> = panel.curves.iter().filter(|curve| !curve.points.is_empty()).collect();
    // The legend is above the curves, so that it covers none.
    let below = if !drawn.is_empty() && (large || panel.curves.len() > 1) {
        let (legend, below) = titled.split_vertically(LEGEND_HEIGHT);
        draw_legend(&legend, &drawn)?;
        below
    } else {
        titled
    };
    let (width, _) = below.dim_in_pixel();
    let on_y = Labels::new(&y, if large { 8 } else { 6 }, false);
    // The labels, and the unit to their left.
    let left = 34 + on_y.widest(label_width).ceil() as u32;
    let pixels = f64::from(width.saturating_sub(left + MARGINS[0] + MARGINS[1]));
    let on_x = Labels::horizontal(&x, x.start.max(0.0), pixels, label_width);
    let mut chart = ChartBuilder::on(&below)
        .margin(MARGINS[0])
        .margin_right(MARGINS[1])
        .x_label_area_size(38)
        .y_label_area_size(left)
        .build_cartesian_2d(Labelled::new(&x, on_x), Labelled::new(&y, on_y))?;
    chart
        .configure_mesh()
        .x_desc(axis.description(panel.span))
        .y_desc(panel.unit)
        .axis_desc_style((FONT, 13))
        .label_style((FONT, LABEL))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .axis_style(BLACK.mix(0.5))
        .draw()?;
    if x.start < 0.0 {
        chart.draw_series([Rectangle::new([(x.start, y.start), (0.0, y.end)], GREY.mix(0.08).filled())])?;
        chart.draw_series(DashedLineSeries::new([(0.0, y.start), (0.0, y.end)], 5, 4, GREY.stroke_width(1)))?;
    }
    for curve in &drawn {
        let color = curve.color;
        let line = if curve.exact || curve.points.len() <= FEW {
            chart.draw_series(curve.points.iter().map(|p| Circle::new(*p, 4, color.filled())))?;
            curve.points.clone()
        } else {
            chart.draw_series(LineSeries::new(curve.points.iter().copied(), color.mix(0.3)))?;
            smooth(&curve.points)
        };
        chart.draw_series(LineSeries::new(line, color.stroke_width(2)))?;
    }
    if drawn.is_empty() {
        let middle = (0.5 * (x.start + x.end), 0.5 * (y.start + y.end));
        chart.draw_series([Text::new("no data", middle, (FONT, 14).into_font().color(&GREY))])?;
    }
    Ok(())
}

/// Curves with few points are drawn as dots, because a single point has no line.
const FEW: usize = 12;
/// The margin around a chart, and at its right end, where half a label extends beyond the axis, in pixels.
const MARGINS: [u32; 2] = [8, 24];
/// The font size of labels in plotters' units.
const LABEL: u32 = 12;
/// The maximum number of characters of a title.
const TITLE: usize = 60;

/// Returns the width of a label in pixels in a wide font; plotters draws letters smaller than the nominal size.
fn label_width(text: &str) -> f64 {
    0.52 * f64::from(LABEL) * text.chars().count() as f64 + 2.0
}

/// Returns a title that fits the page.
fn shortened(name: &str) -> String {
    match name.char_indices().nth(TITLE) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// The height of a legend in pixels.
const LEGEND_HEIGHT: u32 = 20;

/// Draws a line and a name for each curve, side by side.
fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, curves: &[&Curve]) -> DrawResult {
    let style = (FONT, 13).into_font().color(&BLACK);
    let (mut x, y) = (72, LEGEND_HEIGHT as i32 / 2);
    for curve in curves {
        let (width, _) = area.estimate_text_size(curve.label, &style)?;
        area.draw(&PathElement::new([(x, y), (x + 18, y)], curve.color.stroke_width(2)))?;
        area.draw(&Text::new(curve.label, (x + 24, y - 7), style.clone()))?;
        x += 44 + width as i32;
    }
    Ok(())
}

/// Returns the range of a panel's values with a margin; never empty.
fn vertical(panel: &Panel) -> Range<f64> {
    let values = panel.curves.iter().flat_map(|c| c.points.iter().map(|p| p.1));
    let floor = panel.floor.iter().flat_map(|f| [f.start, f.end]);
    let (low, high) =
        values.chain(floor).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > high {
        return 0.0..1.0;
    }
    let margin = 0.05 * (high - low).max(1e-6 * high.abs().max(1.0));
    // An axis with a floor of 0 starts there.
    let start = if panel.floor.is_some() && low == 0.0 { 0.0 } else { low - margin };
    start..high + margin
}

/// Returns the centred moving average over a twentieth of the points.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = points.len() / 40;
    (0..points.len())
        .map(|i| {
            let window = &points[i.saturating_sub(reach)..(i + reach + 1).min(points.len())];
            (points[i].0, window.iter().map(|p| p.1).sum::<f64>() / window.len() as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_rows_can_be_drawn() {
        let wild = [f64::MIN, f64::MAX, 0.0, -0.0, 1e-300, f64::NAN, 5.0];
        let metrics = ["reward", "loss", "entropy", "kl", "clip_ratio/high_mean", "eval/pass@1"];
        let row = |kind, step: u64, i: usize| MetricsRow::new(kind, step, metrics.map(|m| (m, wild[i % wild.len()])));
        assert!(svg("empty", &[]).unwrap().contains("no data"));
        for count in [1, 2, 40] {
            for kind in [RowKind::Warmup, RowKind::Grpo, RowKind::Eval] {
                let same: Vec<_> = (0..count).map(|s| row(kind, s, 6)).collect();
                assert!(svg("same", &same).unwrap().starts_with("<svg"));
            }
        }
    }

    #[test]
    fn only_panels_with_data_are_drawn_and_the_legend_lies_above_the_curves() {
        let row = |step| {
            MetricsRow::new(RowKind::Grpo, step, [("reward", 1.0), ("loss", 0.5), ("frac_reward_zero_std", 0.25)])
        };
        let rows: Vec<_> = (1..=20).map(row).collect();
        let text = svg("run", &rows).unwrap();
        assert!(!text.contains("warm-up") && !text.contains("no data"), "{text}");
        assert!(
            text.contains("GRPO loss") && text.contains("groups with equal rewards") && text.contains("\n100\n"),
            "{text}"
        );
        let warm = [rows, vec![MetricsRow::new(RowKind::Warmup, 1, [("loss", 1.0)])]].concat();
        assert!(svg("run", &warm).unwrap().contains("warm-up: cross-entropy"));
    }

    #[test]
    fn smoothing_keeps_constants_and_ends() {
        let flat: Vec<_> = (0..100).map(|i| (f64::from(i), 2.0)).collect();
        assert_eq!(smooth(&flat), flat);
        assert_eq!(smooth(&[(0.0, 1.0), (1.0, 3.0)]), [(0.0, 1.0), (1.0, 3.0)]);
    }

    #[test]
    fn a_run_of_one_step_has_labels_at_whole_steps() {
        let rows = [MetricsRow::new(RowKind::Grpo, 1, [("reward", 0.5), ("loss", 0.5), ("entropy", 2.0)])];
        let text = svg("run", &rows).unwrap();
        assert_eq!(text.matches("<circle").count(), 3, "{text}");
        assert!(!text.contains("\n0.50\n") && text.contains("\n1\n"), "there is no half of a step: {text}");
        assert!(!text.contains("pass@1"), "nothing was evaluated: {text}");
    }

    #[test]
    fn labels_of_any_values_stay_in_the_picture() {
        for (low, high) in [(0.0, 1e-9), (-1e300, 1e300), (1_234_567.0, 1_234_568.0), (-99_999.5, 99_999.5), (3.0, 3.0)]
        {
            let row = |step: u64| {
                let value = if step.is_multiple_of(2) { low } else { high };
                MetricsRow::new(RowKind::Grpo, 1000 * step, ["reward", "loss", "entropy", "kl"].map(|m| (m, value)))
            };
            let text = svg(&"long name ".repeat(20), &(1..=100).map(row).collect::<Vec<_>>()).unwrap();
            for part in text.split("<text ").skip(1) {
                let attribute = |name: &str| {
                    let (_, rest) =
                        part.split_once(&format!(" {name}=\"")).or(part.split_once(&format!("{name}=\""))).unwrap();
                    rest.split('"').next().unwrap().to_owned()
                };
                let (x, size): (f64, f64) = (attribute("x").parse().unwrap(), attribute("font-size").parse().unwrap());
                let words = part.split_once('>').unwrap().1.split("</text>").next().unwrap().trim();
                let width = 0.65 * size * words.chars().count() as f64;
                let (left, right) = match attribute("text-anchor").as_str() {
                    "end" => (x - width, x),
                    "middle" => (x - width / 2.0, x + width / 2.0),
                    _ => (x, x + width),
                };
                let turned = part.contains("rotate");
                assert!(
                    turned || (left >= 0.0 && right <= 1000.0),
                    "`{words}` from {left} to {right}: {low} to {high}"
                );
            }
        }
    }
}
