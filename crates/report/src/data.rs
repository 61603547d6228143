//! The data for the page's script, as JSON.

use crate::Report;
use crate::curve::{buckets, short, steps_json, values_json};
use crate::phase::{Phase, about, is_share, rank};
use crate::run::Run;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The limit of numbers in all curves of a page, for a few MB of text.
const MOST_NUMBERS: usize = 300_000;
/// The largest and smallest number of points per curve; the largest is about a screen's width in pixels.
const POINTS: (usize, usize) = (1000, 60);
/// The number of points of the clock that maps steps to seconds and tokens.
const TICKS: usize = 300;

/// The phases of a run in page order, with their section titles.
pub(crate) const PHASES: [(&str, &str); 3] =
    [("grpo", "GRPO"), ("eval", "Held-out evaluation"), ("warmup", "Warm-up (supervised)")];

/// Returns the phases of the runs, known ones first.
pub(crate) fn phases(runs: &[Run]) -> Vec<(String, String)> {
    let found: BTreeSet<&String> = runs.iter().flat_map(|run| run.phases.keys()).collect();
    let known = PHASES.iter().filter(|(name, _)| found.iter().any(|found| found == name));
    let known = known.map(|(name, title)| ((*name).to_owned(), (*title).to_owned()));
    let others = found.iter().filter(|found| PHASES.iter().all(|(name, _)| found != &name));
    known.chain(others.map(|name| ((*name).clone(), (*name).clone()))).collect()
}

/// Returns the metrics of a phase over all runs: the important ones, then the others.
pub(crate) fn metrics(runs: &[Run], phase: &str) -> (Vec<String>, Vec<String>) {
    let names: BTreeSet<&String> =
        runs.iter().filter_map(|run| run.phase(phase)).flat_map(|p| p.series.keys()).collect();
    let (mut first, rest): (Vec<_>, Vec<_>) = names.into_iter().cloned().partition(|name| rank(phase, name).is_some());
    first.sort_by_key(|name| rank(phase, name));
    (first, rest)
}

pub(crate) fn json(report: &Report) -> Value {
    let curves: usize = report.runs.iter().flat_map(|run| run.phases.values()).map(|phase| phase.series.len()).sum();
    let most = (MOST_NUMBERS / 3 / curves.max(1)).clamp(POINTS.1, POINTS.0);
    let phases = phases(&report.runs).into_iter().map(|(name, title)| {
        let (first, rest) = metrics(&report.runs, &name);
        json!({ "name": name, "title": title, "first": first, "rest": rest })
    });
    let phases: Vec<Value> = phases.collect();
    let names: BTreeSet<&String> =
        report.runs.iter().flat_map(|run| run.phases.values()).flat_map(|phase| phase.series.keys()).collect();
    let shares: Vec<&&String> = names.iter().filter(|name| is_share(name)).collect();
    let shares = json!(shares);
    let known = names.into_iter().map(|name| (name.clone(), about(name))).filter(|(_, about)| !about.is_empty());
    let about: BTreeMap<String, &str> = known.collect();
    let runs: Vec<Value> = report.runs.iter().map(|run| run_json(run, most)).collect();
    json!({ "phases": phases, "about": about, "shares": shares, "runs": runs })
}

fn run_json(run: &Run, most: usize) -> Value {
    let phases: Map<String, Value> =
        run.phases.iter().map(|(name, phase)| (name.clone(), phase_json(phase, most))).collect();
    json!({ "name": run.name, "phases": phases, "samples": run.samples.rows, "left_out": run.samples.left_out() })
}

/// Returns the curves of a phase. Curves with equal steps share them: `at` is the index in `steps`.
fn phase_json(phase: &Phase, most: usize) -> Value {
    let mut steps: Vec<Value> = Vec::new();
    let curves: Map<String, Value> = phase
        .series
        .iter()
        .map(|(name, points)| {
            let buckets = buckets(points, most);
            let found = steps_json(&buckets);
            let at = steps.iter().position(|known| *known == found).unwrap_or_else(|| {
                steps.push(found);
                steps.len() - 1
            });
            let mut curve = values_json(&buckets);
            curve.insert("at".to_owned(), at.into());
            (name.clone(), Value::Object(curve))
        })
        .collect();
    let last = phase.clock.len().saturating_sub(1);
    let every = phase.clock.len().div_ceil(TICKS).max(1);
    let ticks = phase.clock.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, tick)| tick);
    let clock: Vec<[f64; 3]> = ticks.map(|tick| [tick.step as f64, short(tick.seconds), tick.tokens]).collect();
    json!({ "steps": steps, "curves": curves, "clock": clock })
}
