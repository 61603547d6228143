//! Formats the plan of a run as tables.

use crate::estimates::bytes;
use crate::plan_run::{CompiledPrograms, Document, Row};
use crate::table::Sheet;
use grpo_files::counted;
use grpo_planner::{Settings, first_of_each_mesh};
use grpo_run_config::RecomputeGranularity;
use std::fmt::Write;

/// The default number of rows.
const TOP: usize = 10;

/// The number of columns of the compiler.
const OF_COMPILER: usize = 4;

const HEADER: [&str; 13] = [
    "mesh",
    "rollout",
    "micro-batch",
    "recompute",
    "step",
    "update",
    "links",
    "rollout time",
    "memory",
    "compiled step",
    "compiled update",
    "compiled decode",
    "compiled memory",
];

/// Returns the target, the run and the table of the cost model.
pub(crate) fn predictions(document: &Document, top: Option<usize>) -> String {
    let Document { name, target, chip, devices, memory_bytes, parameters, tokens, sequences, .. } = document;
    format!(
        "{name} on {} of {target} ({:.0} TFLOP/s, {:.0} GB/s, {} for programs, links of {:.0} GB/s)\n{} M parameters; a step \
         of {sequences} sequences of {} + {} tokens\n\nEvery mesh with its best settings, by the cost model:\n\n{}\n\n",
        counted(*devices, "device"),
        chip.peak_flops / 1e12,
        chip.bandwidth / 1e9,
        bytes(*memory_bytes),
        chip.link_bandwidth / 1e9,
        parameters / 1_000_000,
        tokens[0],
        tokens[1],
        meshes(document, top),
    )
}

/// Returns the table of the meshes with the compiler's numbers, if any, and the best settings.
pub(crate) fn results(document: &Document, top: Option<usize>) -> String {
    let mut text = String::new();
    if document.candidates.iter().any(|row| row.compiled.is_some()) {
        let _ = write!(text, "Every mesh with the compiler's numbers, best first:\n\n{}\n\n", meshes(document, top));
    }
    if let Some(best) = &document.best {
        let same_mesh = document.candidates.iter().filter(|row| row.candidate.settings.mesh == best.settings.mesh);
        let same_mesh: Vec<&Row> = same_mesh.collect();
        let _ = write!(text, "Settings of {}:\n\n{}\n\n", best.settings.mesh, table(&same_mesh, top.unwrap_or(TOP)));
    }
    let [fitting, all] = document.fitting;
    let _ = writeln!(text, "{fitting} of {} fit.", counted(all, "candidate"));
    for group in &document.illegal {
        let meshes: Vec<String> = group.meshes.iter().map(ToString::to_string).collect();
        let _ =
            writeln!(text, "Left out, {}: {} ({}).", counted(meshes.len(), "mesh"), meshes.join(", "), group.reason);
    }
    let _ = writeln!(
        text,
        "Times are predictions of a cost model, not measurements; links: the part of an update that the links between devices take."
    );
    match &document.not_compiled {
        Some(reason) => {
            let _ = writeln!(text, "Nothing was compiled, the numbers are those of the cost model alone: {reason}.");
        }
        None => text.push_str(
            "The compiler's estimates leave out the links; compiled step: the predicted step with the compiler's time of its updates; compiled decode: a token of every sequence, with all columns of the cache.\n",
        ),
    }
    if let Some(best) = &document.best {
        let _ = write!(text, "\nThe best settings, {}:\n\n{}", best.settings.mesh, best.yaml);
    }
    text
}

/// Returns the table of the first candidate of every mesh.
fn meshes(document: &Document, top: Option<usize>) -> String {
    table(&first_of_each_mesh(&document.candidates, |row| row.candidate.settings.mesh), top.unwrap_or(TOP))
}

fn table(rows: &[&Row], top: usize) -> String {
    let has_compiled = rows.iter().any(|row| row.compiled.is_some());
    let columns = if has_compiled { HEADER.len() } else { HEADER.len() - OF_COMPILER };
    let header = HEADER.into_iter().take(columns).chain([""]);
    let mut table = Sheet::new(header, 4..columns).named();
    for row in rows.iter().take(top) {
        table.row(cells(row).into_iter().take(columns).chain([fits(row)]));
    }
    let more = match rows.len().saturating_sub(top) {
        0 => String::new(),
        more => format!("\n... and {more} more (--top)"),
    };
    format!("{}{more}", table.text())
}

fn cells(row: &Row) -> [String; 13] {
    let candidate = &row.candidate;
    let settings = &candidate.settings;
    let compiled = row.compiled.as_ref();
    [
        settings.mesh.to_string(),
        settings.rollout_mesh.to_string(),
        counted(candidate.micro_batch, "sequence"),
        recompute(settings),
        seconds(candidate.step_seconds),
        seconds(candidate.update.seconds()),
        seconds(candidate.update.link_seconds),
        seconds(candidate.rollout.seconds()),
        bytes(candidate.memory_bytes),
        compiled.map_or_else(String::new, |c| c.step_seconds.map_or("-".into(), seconds)),
        compiled.map_or_else(String::new, |c| c.update_seconds.map_or("-".into(), seconds)),
        compiled.map_or_else(String::new, |c| c.decode_seconds.map_or("-".into(), seconds)),
        compiled.map_or_else(String::new, |c| c.memory_bytes.map_or("-".into(), bytes)),
    ]
}

fn fits(row: &Row) -> String {
    match &row.compiled {
        _ if row.fits() => String::new(),
        Some(CompiledPrograms { .. }) => "does not fit, by the compiler".into(),
        None => "does not fit".into(),
    }
}

/// Returns the recomputation of settings, such as `full, groups of 4`.
pub(crate) fn recompute(settings: &Settings) -> String {
    let name = match settings.recompute_granularity {
        RecomputeGranularity::Full => "full",
        RecomputeGranularity::ExceptAttention => "except_attention",
        RecomputeGranularity::Selective => "selective",
        RecomputeGranularity::None => "none",
    };
    match settings.recompute_num_layers {
        1 => name.to_owned(),
        layers => format!("{name}, groups of {layers}"),
    }
}

/// Formats seconds with three digits: `1.23 s`, `45.6 ms`.
fn seconds(seconds: f64) -> String {
    match 1e3 * seconds {
        ms if ms >= 1e5 => format!("{seconds:.0} s"),
        ms if ms >= 1e4 => format!("{seconds:.1} s"),
        ms if ms >= 1e3 => format!("{seconds:.2} s"),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.2} ms"),
    }
}
