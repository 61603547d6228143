//! Formats compilers' reports as a table.

use crate::aot::Document;
use crate::aot_worker::Compiled;
use crate::estimates::{bytes, milliseconds, rates, tiles};
use crate::table::Sheet;
use grpo_backend_tpu::aot::Report;
use std::fmt::Write;

const HEADER: [&str; 11] = [
    "variant",
    "tiles",
    "temp",
    "arguments",
    "results",
    "aliased",
    "code",
    "bytes moved",
    "estimate",
    "by cycles",
    "floor",
];

pub(crate) fn text(document: &Document) -> String {
    let mut table = Sheet::new(HEADER, 2..HEADER.len()).named();
    for (name, compiled) in &document.variants {
        match compiled {
            Compiled::Report(report) => table.row(row(name, report)),
            Compiled::Failed { .. } => table.row([name.as_str(), "failed"]),
        }
    }
    let (name, target, chip) = (&document.name, &document.target, document.chip);
    let mut text = format!("{name} on {target}, per device ({})\n\n{}\n\n", rates(chip), table.text(),);
    text.push_str("Estimates are the compiler's, not measurements; a loop's body counts once per iteration.\n");
    let reports = || document.variants.values().filter_map(Compiled::report);
    if let Some(reason) = reports().find_map(|report| report.no_estimate.as_ref()) {
        let _ = writeln!(text, "No estimates: {reason}.");
    }
    let (before, now): (Vec<&Report>, Vec<_>) = reports().partition(|report| report.from_cache);
    let seconds = |of: &[&Report]| of.iter().map(|report| report.compile_seconds).sum::<f64>();
    let mut compiled = format!("Compiled in {:.0} s", seconds(&now));
    if !before.is_empty() {
        let _ = write!(compiled, ", and in {:.0} s by earlier runs (--recompile ignores them)", seconds(&before));
    }
    let _ = writeln!(
        text,
        "Floor: the necessary matmuls at the peak rate, or arguments and results moved once. {compiled}."
    );
    for assertion in &document.assertions {
        let _ = writeln!(text, "{}: {assertion}", assertion.verdict());
    }
    text
}

fn row(name: &str, report: &Report) -> [String; 11] {
    let time = |seconds: Option<f64>| seconds.map_or("-".into(), milliseconds);
    [
        name.to_owned(),
        tiles(report.blocking),
        bytes(report.temp_bytes),
        bytes(report.argument_bytes),
        bytes(report.output_bytes),
        bytes(report.alias_bytes),
        bytes(report.code_bytes),
        report.bytes_accessed.map_or("-".into(), |moved| bytes(moved as u64)),
        time(report.estimate_seconds),
        time(report.estimate_cycles_seconds),
        milliseconds(report.floor.seconds),
    ]
}
