//! Draws curves.svg, an overview of a run.
//!
//! The first panel shows the whole run: GRPO steps, and the warm-up left of 0. The warm-up always gets the same share of the width,
//! because it may have many more (and much shorter) steps. Each other panel shows one phase.

use super::jsonl::{MetricsRow, RowKind};
use grpo_files::noun;
use grpo_plot::{Anchor, Axis, COLORS, Chart, Svg, horizontal_labels, labels, shortened, text_width, widest};
use std::ops::Range;

const BLUE: &str = COLORS[0];
const VERMILLION: &str = COLORS[1];
const GREEN: &str = COLORS[2];
const PURPLE: &str = "#94508C";
const GREY: &str = "#6E6E6E";

/// One line in a panel.
struct Curve {
    label: &'static str,
    color: &'static str,
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
struct Steps {
    warmup: f64,
    grpo: f64,
}

impl Steps {
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

fn curve(rows: &[MetricsRow], kind: RowKind, metric: &str, label: &'static str, color: &'static str) -> Curve {
    let rows_of_kind = || rows.iter().filter(|row| row.phase == kind);
    // Values of an earlier rule by which completions passed are another metric.
    let last = rows_of_kind().next_back();
    let comparable = rows_of_kind().filter(|row| last.is_none_or(|last| row.is_comparable(last, metric)));
    let points = comparable.filter_map(|row| Some((row.step as f64, row.get(metric)?))).collect();
    Curve { label, color, points, exact: kind == RowKind::Eval }
}

/// Draws the curves of a run as an SVG document.
pub fn svg(name: &str, rows: &[MetricsRow]) -> String {
    let last = |kind| rows.iter().filter(|r| r.phase == kind).map(|r| r.step).max().unwrap_or(0) as f64;
    let steps = Steps { warmup: last(RowKind::Warmup), grpo: last(RowKind::Grpo).max(1.0) };

    let mut panels = details(rows);
    // Panels without data are dropped.
    panels.retain(|panel| panel.curves.iter().any(|curve| !curve.points.is_empty()));
    let mut svg = Svg::new(1000, 380 + 250 * panels.len().div_ceil(2) as u32);
    svg.text(&shortened(name, 60), (500.0, 20.0), 20.0, Anchor::Middle);
    draw_panel(&mut svg, &Area { left: 0.0, top: 40.0, width: 1000.0, height: 340.0 }, &outcome(&steps, rows), &steps);
    for (i, panel) in panels.iter().enumerate() {
        let (left, top) = (500.0 * (i % 2) as f64, 380.0 + 250.0 * (i / 2) as f64);
        draw_panel(&mut svg, &Area { left, top, width: 500.0, height: 250.0 }, panel, &steps);
    }
    svg.finish()
}

fn outcome(steps: &Steps, rows: &[MetricsRow]) -> Panel {
    // The warm-up has no rewards; its likelihood per answer token is a share, too.
    let mut learned = curve(rows, RowKind::Warmup, "loss", "warm-up: likelihood per answer token", GREY);
    for (x, y) in &mut learned.points {
        *x = WARMUP_SHARE * steps.grpo * (*x / steps.warmup - 1.0);
        *y = (-*y).exp();
    }
    let evaluated = rows.iter().any(|row| row.phase == RowKind::Eval);
    let title = if evaluated { "reward and held-out pass@1" } else { "reward" };
    let curves = vec![
        learned,
        curve(rows, RowKind::Grpo, "reward", "reward of training samples", BLUE),
        curve(rows, RowKind::Eval, "eval/reward", "held-out reward (sampled)", GREEN),
        curve(rows, RowKind::Eval, "eval/pass@1", "held-out pass@1", VERMILLION),
    ];
    Panel { title, unit: "share, reward", curves, floor: Some(0.0..1.0), span: Span::Whole }
}

fn details(rows: &[MetricsRow]) -> Vec<Panel> {
    let grpo = |metric, label, color| curve(rows, RowKind::Grpo, metric, label, color);
    let percent = |metric, label, color| {
        let mut curve = grpo(metric, label, color);
        curve.points.iter_mut().for_each(|(_, share)| *share *= 100.0);
        curve
    };
    let has = |metric: &str| rows.iter().any(|r| r.phase == RowKind::Grpo && r.get(metric).is_some());
    let panel = |title, unit, floor, curves| Panel { title, unit, curves, floor, span: Span::Grpo };
    let zero = Some(0.0..0.0);
    let drift = if has("kl") {
        let kl = grpo("kl", "KL to the reference", VERMILLION);
        panel("KL(policy || reference)", "nats / token", zero.clone(), vec![kl])
    } else {
        panel("gradient norm", "2-norm", zero.clone(), vec![grpo("grad_norm", "norm before clipping", VERMILLION)])
    };
    let clipped = if has("cispo_clip_ratio") {
        vec![grpo("cispo_clip_ratio", "capped", PURPLE)]
    } else {
        vec![
            grpo("clip_ratio/high_mean", "above 1 + epsilon_high", PURPLE),
            grpo("clip_ratio/low_mean", "below 1 - epsilon_low", GREY),
        ]
    };
    let lost = vec![
        percent("frac_reward_zero_std", "groups with equal rewards", BLUE),
        percent("completions/clipped_ratio", "completions cut off", VERMILLION),
    ];
    let supervised = vec![curve(rows, RowKind::Warmup, "loss", "supervised loss", GREY)];
    let warmup = panel("warm-up: cross-entropy of answers", "nats / token", zero.clone(), supervised);
    vec![
        Panel { span: Span::Warmup, ..warmup },
        panel("GRPO loss", "loss", None, vec![grpo("loss", "loss", BLUE)]),
        panel("entropy of the policy", "nats / token", zero, vec![grpo("entropy", "entropy", GREEN)]),
        drift,
        panel("clip ratio", "share of tokens", Some(0.0..0.01), clipped),
        panel("groups without a signal, completions cut off", "%", Some(0.0..100.0), lost),
    ]
}

/// The part of the document that a panel has, in pixels.
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

fn draw_panel(svg: &mut Svg, area: &Area, panel: &Panel, steps: &Steps) {
    let (x, y, large) = (steps.range(panel.span), vertical(panel), panel.span == Span::Whole);
    svg.text(
        panel.title,
        (area.left + area.width / 2.0, area.top + 14.0),
        if large { 15.0 } else { 13.0 },
        Anchor::Middle,
    );
    let drawn: Vec<&Curve> = panel.curves.iter().filter(|curve| !curve.points.is_empty()).collect();
    // The legend is above the curves, so that it covers none.
    let has_legend = !drawn.is_empty() && (large || panel.curves.len() > 1);
    let on_y = labels(&y, if large { 8 } else { 6 }, false);
    // The labels, and the title of the axis to their left.
    let (left, right) = (area.left + 42.0 + widest(&on_y), area.left + area.width - 24.0);
    let (top, bottom) = (area.top + if has_legend { 50.0 } else { 32.0 }, area.top + area.height - 46.0);
    if has_legend {
        draw_legend(svg, (left, area.top + 36.0), &drawn);
    }
    let on_x = horizontal_labels(&x, x.start.max(0.0), right - left);
    let chart = Chart {
        x: Axis::linear(&steps.description(panel.span), x.clone(), on_x).between(left, right),
        y: Axis::linear(panel.unit, y, on_y).between(bottom, top),
    };
    if x.start < 0.0 {
        let zero = chart.x.at(0.0);
        svg.rectangle((left, top), (zero, bottom), &format!("fill=\"{GREY}\" fill-opacity=\"0.08\""));
        svg.line([(zero, top), (zero, bottom)], &format!("stroke=\"{GREY}\" stroke-dasharray=\"5 4\""));
    }
    chart.draw(svg);
    for Curve { color, points, exact, .. } in drawn.iter().copied() {
        let mut line = |points: &[(f64, f64)], style: &str| {
            svg.line(points.iter().map(|point| chart.at(*point)), &format!("stroke=\"{color}\" {style}"));
        };
        if *exact || points.len() <= FEW {
            line(points, "stroke-width=\"2\"");
            points.iter().for_each(|point| svg.circle(chart.at(*point), 4.0, color));
        } else {
            line(points, "stroke-opacity=\"0.3\"");
            line(&smooth(points), "stroke-width=\"2\"");
        }
    }
    if drawn.is_empty() {
        svg.text("no data", (left.midpoint(right), top.midpoint(bottom)), 14.0, Anchor::Middle);
    }
}

/// Curves with few points are drawn as dots, because a single point has no line.
const FEW: usize = 12;

/// Draws a line and a name for each curve, side by side.
fn draw_legend(svg: &mut Svg, (mut x, y): (f64, f64), curves: &[&Curve]) {
    for Curve { label, color, .. } in curves {
        svg.line([(x, y), (x + 18.0, y)], &format!("stroke=\"{color}\" stroke-width=\"2\""));
        svg.text(label, (x + 24.0, y), 11.0, Anchor::Start);
        x += 40.0 + text_width(label, 10.0);
    }
}

/// Returns the range of a panel's values with a margin; never empty and never infinite.
fn vertical(panel: &Panel) -> Range<f64> {
    let values = panel.curves.iter().flat_map(|c| c.points.iter().map(|p| p.1));
    let floor = panel.floor.iter().flat_map(|f| [f.start, f.end]);
    let (low, high) =
        values.chain(floor).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > high {
        return 0.0..1.0;
    }
    let size = low.abs().max(high.abs());
    let margin = if high - low <= 1e-5 * size {
        // A constant is in the middle of an axis with readable labels.
        if size == 0.0 { 1.0 } else { 0.5 * size }
    } else {
        0.05 * (high - low).max(1e-6)
    };
    // An axis with a floor of 0 starts there.
    let start = if panel.floor.is_some() && low == 0.0 { 0.0 } else { low - margin };
    start.max(f64::MIN)..(high + margin).min(f64::MAX)
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
        assert!(svg("empty", &[]).contains("no data"));
        for count in [1, 2, 40] {
            for kind in [RowKind::Warmup, RowKind::Grpo, RowKind::Eval] {
                let constant: Vec<_> = (0..count).map(|s| row(kind, s, 6)).collect();
                let varied: Vec<_> = (0..count).map(|s| row(kind, s, s as usize)).collect();
                for text in [svg("constant", &constant), svg("varied", &varied)] {
                    assert!(text.starts_with("<svg") && !text.contains("NaN") && !text.contains("inf"), "{text}");
                }
            }
        }
    }

    #[test]
    fn only_panels_with_data_are_drawn_and_the_legend_lies_above_the_curves() {
        let values = [("reward", 1.0), ("loss", 0.5), ("frac_reward_zero_std", 0.25)];
        let rows: Vec<_> = (1..=20).map(|step| MetricsRow::new(RowKind::Grpo, step, values)).collect();
        let text = svg("run", &rows);
        assert!(!text.contains("warm-up") && !text.contains("no data"), "{text}");
        for words in ["GRPO loss", "groups with equal rewards", ">100<"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let warm = [rows, vec![MetricsRow::new(RowKind::Warmup, 1, [("loss", 1.0)])]].concat();
        assert!(svg("run", &warm).contains("warm-up: cross-entropy"));
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
        let text = svg("run", &rows);
        assert_eq!(text.matches("<circle").count(), 3, "{text}");
        assert!(!text.contains(">0.50<") && text.contains(">1<"), "there is no half of a step: {text}");
        assert!(!text.contains("pass@1"), "nothing was evaluated: {text}");
    }

    #[test]
    fn points_of_an_earlier_pass_rule_are_not_drawn() {
        let row = |step, rule: &str| MetricsRow {
            pass_rule: Some(rule.to_owned()),
            ..MetricsRow::new(RowKind::Eval, step, [("eval/pass@1", 0.5)])
        };
        let points = |rules: [&str; 3]| {
            let rows = [row(0, rules[0]), row(5, rules[1]), row(9, rules[2])];
            curve(&rows, RowKind::Eval, "eval/pass@1", "pass@1", BLUE).points
        };
        assert_eq!(points(["a", "a", "a"]).len(), 3);
        assert_eq!(points(["a", "b", "b"]), [(5.0, 0.5), (9.0, 0.5)]);
    }

    #[test]
    fn labels_of_any_values_stay_in_the_picture() {
        for (low, high) in [(0.0, 1e-9), (-1e300, 1e300), (1_234_567.0, 1_234_568.0), (-99_999.5, 99_999.5), (3.0, 3.0)]
        {
            let row = |step: u64| {
                let value = if step.is_multiple_of(2) { low } else { high };
                MetricsRow::new(RowKind::Grpo, 1000 * step, ["reward", "loss", "entropy", "kl"].map(|m| (m, value)))
            };
            let text = svg(&"long name ".repeat(20), &(1..=100).map(row).collect::<Vec<_>>());
            for part in text.split("<text ").skip(1) {
                let attribute =
                    |name: &str| part.split(['"', ' ', '=']).skip_while(|word| *word != name).nth(2).unwrap();
                let (x, size): (f64, f64) = (attribute("x").parse().unwrap(), attribute("font-size").parse().unwrap());
                let words = part.split_once('>').unwrap().1.split("</text>").next().unwrap().trim();
                let width = 0.65 * size * words.chars().count() as f64;
                let (left, right) = match attribute("text-anchor") {
                    "end" => (x - width, x),
                    "middle" => (x - width / 2.0, x + width / 2.0),
                    _ => (x, x + width),
                };
                let is_inside = part.contains("rotate") || (left >= 0.0 && right <= 1000.0);
                assert!(is_inside, "`{words}` from {left} to {right}: {low} to {high}");
            }
        }
    }
}
