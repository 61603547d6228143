//! The sections of the page that consist of tables.

use crate::Report;
use crate::config::{differences, leaves};
use crate::data::{metrics, phases};
use crate::figures::{change_of, evaluated, figures, number, percent, seconds_text, value_of};
use crate::html::Html;
use crate::phase::{Phase, about};
use crate::run::Run;
use grpo_files::{counted, to_yaml};
use std::collections::BTreeSet;

/// The number of colours of runs and of line styles, as in the script and the style sheet.
const COLOURS: usize = 8;
const DASHES: usize = 3;

/// Writes the name of a run with its line style in charts.
fn run_name(html: &mut Html, index: usize, name: &str) {
    let (colour, dash) = (index % COLOURS, index / COLOURS % DASHES);
    html.raw("<span class=\"run c").show(colour).raw(" d").show(dash).raw("\"><span class=\"swatch\"></span>");
    html.text(name).raw("</span>");
}

/// Writes a table that scrolls sideways on narrow screens. `label` names it.
fn table(html: &mut Html, label: &'static str, class: &'static str, fill: impl FnOnce(&mut Html)) {
    html.raw("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"")
        .text(label)
        .raw("\">\n<table class=\"")
        .raw(class)
        .raw("\">\n");
    fill(html);
    html.raw("</table>\n</div>\n");
}

/// Writes a header row: `first`, and a column for each run.
fn run_columns(html: &mut Html, first: &str, runs: &[Run]) {
    html.raw("<thead><tr><th scope=\"col\">").text(first).raw("</th>");
    for (index, run) in runs.iter().enumerate() {
        html.raw("<th scope=\"col\">");
        run_name(html, index, &run.name);
        html.raw("</th>");
    }
    html.raw("</tr></thead>\n");
}

/// Writes a section with its heading.
pub(super) fn section(html: &mut Html, id: &'static str, title: &'static str, fill: impl FnOnce(&mut Html)) {
    html.raw("<section id=\"").raw(id).raw("\" aria-labelledby=\"").raw(id).raw("-title\">\n<h2 id=\"").raw(id);
    html.raw("-title\">").raw(title).raw("</h2>\n");
    fill(html);
    html.raw("</section>\n");
}

/// Writes a cell with a value, or with a dash if the run has none.
fn cell(html: &mut Html, value: Option<&str>) {
    match value {
        Some(text) => html.element("td", text),
        None => html.raw("<td class=\"none\">–</td>"),
    };
}

pub(super) fn summary(html: &mut Html, report: &Report) {
    let runs = &report.runs;
    let notes: Vec<String> = report.notes().collect();
    if !notes.is_empty() {
        html.raw("<div class=\"note\" role=\"note\">\n<p>About the files of the runs:</p>\n<ul>");
        for note in notes {
            html.element("li", &note);
        }
        html.raw("</ul>\n</div>\n");
    }
    for (index, run) in runs.iter().enumerate() {
        let Some(error) = &run.failure else { continue };
        html.raw("<div class=\"note failed\" role=\"note\">\n<p>");
        run_name(html, index, &run.name);
        html.raw(" ended with an error:</p>\n<pre tabindex=\"0\">").text(error).raw("</pre>\n</div>\n");
    }
    let columns: Vec<_> = runs.iter().map(figures).collect();
    table(html, "Figures of the runs", "runs", |html| {
        run_columns(html, "", runs);
        html.raw("<tbody>\n<tr><th scope=\"row\">folder</th>");
        for run in runs {
            html.raw("<td class=\"path\">").text(&run.folder.display().to_string()).raw("</td>");
        }
        html.raw("</tr>\n");
        for (row, (name, _)) in columns[0].iter().enumerate() {
            if columns.iter().all(|figures| figures[row].1.is_none()) {
                continue;
            }
            html.raw("<tr><th scope=\"row\">").text(name).raw("</th>");
            columns.iter().for_each(|figures| cell(html, figures[row].1.as_deref()));
            html.raw("</tr>\n");
        }
        html.raw("</tbody>\n");
    });
}

pub(super) fn evaluations(html: &mut Html, runs: &[Run]) {
    let (first, _) = metrics(runs, "eval");
    if first.is_empty() {
        html.raw("<p>There are no evaluations.</p>\n");
        return;
    }
    html.raw("<p>On held-out problems: before the first GRPO step, the best, and the last.</p>\n");
    table(html, "Evaluations", "numbers", |html| {
        html.raw("<thead><tr><th scope=\"col\">metric</th><th scope=\"col\">run</th><th scope=\"col\">before</th>");
        html.raw("<th scope=\"col\">best</th><th scope=\"col\">last</th><th scope=\"col\">change</th></tr></thead>\n<tbody>\n");
        for metric in &first {
            for (index, run) in runs.iter().enumerate() {
                let Some(found) = evaluated(run, metric) else { continue };
                html.raw("<tr><th scope=\"row\">").text(metric).raw("</th><td>");
                run_name(html, index, &run.name);
                html.raw("</td>").element("td", &value_of(metric, found.first));
                html.element("td", &format!("{} at step {}", value_of(metric, found.best.1), found.best.0));
                html.element("td", &value_of(metric, found.last));
                html.element("td", &change_of(metric, found.last - found.first)).raw("</tr>\n");
            }
        }
        html.raw("</tbody>\n");
    });
}

const TIMING: &str = "timing_s/";

pub(super) fn times(html: &mut Html, runs: &[Run]) {
    let grpo = || runs.iter().filter_map(|run| run.phase("grpo"));
    let parts: BTreeSet<&str> =
        grpo().flat_map(|phase| phase.series.keys()).filter_map(|n| n.strip_prefix(TIMING)).collect();
    if grpo().all(|phase| phase.seconds().is_none()) {
        html.raw("<p>No run says how long its GRPO steps took.</p>\n");
        return;
    }
    html.raw("<p>Seconds per step, mean over the run, and the share of the step. Evaluations and checkpoints are not part of a step.</p>\n");
    let mean = |phase: &Phase, name: &str| {
        let steps = phase.finite("step_time").count().max(1) as f64;
        phase.finite(name).map(|(_, seconds)| seconds / steps).sum::<f64>()
    };
    table(html, "Time per step", "runs", |html| {
        run_columns(html, "", runs);
        html.raw("<tbody>\n");
        for part in parts.iter().map(|part| Some(*part)).chain([None]) {
            html.raw("<tr><th scope=\"row\">").text(part.unwrap_or("the rest")).raw("</th>");
            for phase in runs.iter().map(|run| run.phase("grpo")) {
                let is_known =
                    |phase: &&Phase| part.is_none_or(|part| phase.series.contains_key(&format!("{TIMING}{part}")));
                let Some(phase) = phase.filter(is_known) else {
                    cell(html, None);
                    continue;
                };
                let whole = mean(phase, "step_time");
                let of = |part: &str| mean(phase, &format!("{TIMING}{part}"));
                let rest = || (whole - parts.iter().map(|part| of(part)).sum::<f64>()).max(0.0);
                let seconds = part.map_or_else(rest, of);
                let share = if whole > 0.0 { (seconds / whole).min(1.0) } else { 0.0 };
                html.raw("<td>").text(&seconds_text(seconds)).raw(" <span class=\"muted\">").text(&percent(share));
                html.raw("</span><svg class=\"bar\" aria-hidden=\"true\">");
                html.raw("<rect width=\"100%\" height=\"6\" class=\"track\" />");
                html.raw("<rect height=\"6\" width=\"").show(format!("{:.1}", 100.0 * share)).raw("%\" /></svg></td>");
            }
            html.raw("</tr>\n");
        }
        html.raw("<tr><th scope=\"row\">whole step</th>");
        for run in runs {
            let whole = run.phase("grpo").filter(|p| p.seconds().is_some()).map(|p| seconds_text(mean(p, "step_time")));
            cell(html, whole.as_deref());
        }
        html.raw("</tr>\n</tbody>\n");
    });
}

pub(super) fn configuration(html: &mut Html, report: &Report) {
    let runs = &report.runs;
    let (mut configs, mut title) =
        (runs.iter().map(|run| run.config.as_ref()).collect::<Vec<_>>(), "Keys in which the runs differ.");
    if let ([run], Some(defaults)) = (runs.as_slice(), &report.defaults) {
        (configs, title) =
            (vec![run.config.as_ref(), Some(defaults)], "Keys that have another value than the default.");
    }
    let found = differences(&configs);
    if configs.len() > 1 {
        if found.is_empty() {
            html.raw("<p>No key differs.</p>\n");
        } else {
            html.raw("<p>").raw(title).raw("</p>\n");
            table(html, "Differences of configuration", "runs", |html| {
                if runs.len() > 1 {
                    run_columns(html, "key", runs);
                } else {
                    html.raw("<thead><tr><th scope=\"col\">key</th><th scope=\"col\">this run</th><th scope=\"col\">default</th></tr></thead>\n");
                }
                html.raw("<tbody>\n");
                for (key, values) in &found {
                    html.raw("<tr><th scope=\"row\"><code>");
                    // Narrow screens may break a key after its dots.
                    for part in key.split_inclusive('.') {
                        html.text(part).raw("<wbr />");
                    }
                    html.raw("</code></th>");
                    values.iter().for_each(|value| cell(html, value.as_deref()));
                    html.raw("</tr>\n");
                }
                html.raw("</tbody>\n");
            });
        }
    }
    for (index, run) in runs.iter().enumerate() {
        if !run.changes.is_empty() {
            html.raw("<p>Changed when ");
            run_name(html, index, &run.name);
            html.raw(" was continued:</p>\n<ul>");
            for change in &run.changes {
                let at = change.checkpoint.as_deref().unwrap_or("the beginning");
                html.raw("<li><code>")
                    .text(&change.key)
                    .raw("</code> from ")
                    .show(&change.from)
                    .raw(" to ")
                    .show(&change.to);
                html.raw(" at ").text(at).raw("</li>");
            }
            html.raw("</ul>\n");
        }
        let Some(config) = &run.config else { continue };
        html.raw("<details><summary>Whole configuration of ");
        run_name(html, index, &run.name);
        // A configuration that YAML cannot represent is shown key by key.
        let by_key = || leaves(config).iter().map(|(key, value)| format!("{key}: {value}\n")).collect();
        let text: String = to_yaml(config).unwrap_or_else(|_| by_key());
        html.raw("</summary><pre tabindex=\"0\">").text(&text).raw("</pre></details>\n");
    }
}

pub(super) fn every_metric(html: &mut Html, runs: &[Run]) {
    for (phase, title) in phases(runs) {
        let (first, rest) = metrics(runs, &phase);
        html.raw("<details><summary>")
            .text(&title)
            .raw(": ")
            .text(&counted(first.len() + rest.len(), "metric"))
            .raw("</summary>\n");
        table(html, "All metrics", "numbers", |html| {
            html.raw("<thead><tr><th scope=\"col\">metric</th><th scope=\"col\">run</th><th scope=\"col\">first</th>");
            html.raw("<th scope=\"col\">last</th><th scope=\"col\">smallest</th><th scope=\"col\">largest</th>");
            html.raw("<th scope=\"col\">mean</th></tr></thead>\n<tbody>\n");
            for metric in first.iter().chain(&rest) {
                for (index, run) in runs.iter().enumerate() {
                    let Some(phase) = run.phase(&phase).filter(|phase| phase.series.contains_key(metric)) else {
                        continue;
                    };
                    html.raw("<tr><th scope=\"row\" title=\"")
                        .text(about(metric))
                        .raw("\">")
                        .text(metric)
                        .raw("</th><td>");
                    run_name(html, index, &run.name);
                    html.raw("</td>");
                    for value in five(phase, metric) {
                        cell(html, value.map(number).as_deref());
                    }
                    html.raw("</tr>\n");
                }
            }
            html.raw("</tbody>\n");
        });
        html.raw("</details>\n");
    }
}

/// Returns the first, last, smallest, largest and mean value of a metric.
fn five(phase: &Phase, metric: &str) -> [Option<f64>; 5] {
    let values: Vec<f64> = phase.finite(metric).map(|(_, value)| value).collect();
    let count = values.len() as f64;
    let mean = (!values.is_empty()).then(|| values.iter().map(|value| value / count).sum());
    let fold = |pick: fn(f64, f64) -> f64| values.iter().copied().reduce(pick);
    [values.first().copied(), values.last().copied(), fold(f64::min), fold(f64::max), mean]
}
