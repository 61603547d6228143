//! Formats the reports of a run's programs as tables.

use crate::aot_run::Document;
use crate::aot_worker::Compiled;
use crate::estimates::{bytes, milliseconds, rates};
use crate::table::Sheet;
use grpo_aot::{Memory, ProcessShards, Times};
use grpo_backend_tpu::aot::Report;
use grpo_files::{counted, grouped};
use std::collections::BTreeMap;
use std::fmt::Write;

const HEADER: [&str; 11] = [
    "program",
    "arguments",
    "results",
    "aliased",
    "temp",
    "code",
    "on the device",
    "estimate",
    "floor",
    "received",
    "compiled in",
];

pub(crate) fn text(document: &Document) -> String {
    let mut table = Sheet::new(HEADER, 1..HEADER.len()).named();
    for (name, compiled) in &document.programs {
        match compiled {
            Compiled::Report(report) => {
                let total = document.memory.as_ref().and_then(|memory| memory.totals.get(name)).copied();
                table.row(row(name, report, total));
            }
            Compiled::Failed { .. } => table.row([name.as_str(), "failed"]),
        }
    }
    let (name, target, chip, sizes) = (&document.name, &document.target, document.chip, document.sizes);
    let devices = match &document.meshes {
        None => "one device".to_owned(),
        Some([training, sampling]) => {
            format!("{}, training on {training}, sampling on {sampling},", counted(sizes.devices, "device"))
        }
    };
    let mut text = format!(
        "{name} on {devices} of {target} ({})\n{} M parameters; {} of {} x {}, {} of \
         them in the loss; rollout of {} x ({} + {}) tokens\n\n{}\n\n",
        rates(chip),
        sizes.parameters / 1_000_000,
        counted(sizes.micro_batches, "micro-batch"),
        sizes.rows,
        counted(sizes.length, "token"),
        sizes.tokens,
        sizes.slots,
        sizes.prompt,
        sizes.completion,
        table.text(),
    );
    write_processes(&mut text, document);
    if let Some(memory) = &document.memory {
        write_memory(&mut text, memory);
    }
    write_traffic(&mut text, document);
    if let Some(times) = &document.times {
        write_times(&mut text, times);
    }
    text.push_str("Estimates are the compiler's, not measurements; a loop's body counts once per iteration. compiled in: processor time.\n");
    // Grouped by reason, because a plugin without estimates has the same for all programs.
    let mut missing: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, compiled) in &document.programs {
        if let Some(reason) = compiled.report().and_then(|report| report.no_estimate.as_ref()) {
            missing.entry(reason).or_default().push(name);
        }
    }
    for (reason, names) in missing {
        let _ = writeln!(text, "No estimate of {}: {reason}.", names.join(", "));
    }
    for assertion in &document.assertions {
        let _ = writeln!(text, "{}: {assertion}", assertion.verdict());
    }
    text
}

fn row(name: &str, report: &Report, total: Option<u64>) -> [String; 11] {
    [
        name.to_owned(),
        bytes(report.argument_bytes),
        bytes(report.output_bytes),
        bytes(report.alias_bytes),
        bytes(report.temp_bytes),
        bytes(report.code_bytes),
        total.map_or("-".into(), bytes),
        report.estimate_seconds.map_or("-".into(), milliseconds),
        milliseconds(report.floor.seconds),
        gigabytes(report.traffic.bytes()),
        format!("{:.1} s", report.compile_processor_seconds),
    ]
}

/// Formats bytes of collectives: `-` for none.
fn gigabytes(bytes: f64) -> String {
    if bytes > 0.0 { format!("{:.2} GB", bytes / 1e9) } else { "-".into() }
}

/// Writes the shards of each process if there are several.
fn write_processes(text: &mut String, document: &Document) {
    let processes = &document.processes;
    if processes.len() < 2 {
        return;
    }
    let mut table = Sheet::new(["process", "devices", "places in the mesh of training", "weights"], 3..4).named();
    let list = |all: &[i32]| all.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
    for ProcessShards { process_index, devices, coordinates, weights } in processes {
        let place = |along: &Vec<usize>| along.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let places = coordinates.iter().map(place).collect::<Vec<_>>().join(" ");
        table.row([process_index.to_string(), list(devices), places, grouped(*weights as u64)]);
    }
    let _ = writeln!(text, "{}\n", table.text());
}

/// Writes what each device receives in a program's collectives, by kind.
fn write_traffic(text: &mut String, document: &Document) {
    let moved = document.programs.iter().filter_map(|(name, compiled)| Some((name, &compiled.report()?.traffic)));
    let moved: Vec<_> = moved.filter(|(_, traffic)| traffic.bytes() > 0.0).collect();
    if moved.is_empty() {
        return;
    }
    let _ = writeln!(text, "A device receives in the collectives of a program:");
    for (name, traffic) in moved {
        let kinds = traffic.by_kind().iter().filter(|(_, bytes)| **bytes > 0.0);
        let kinds: Vec<String> = kinds.map(|(kind, bytes)| format!("{kind} {}", gigabytes(*bytes))).collect();
        let _ = writeln!(text, "  {name}: {}", kinds.join(", "));
    }
    text.push('\n');
}

/// Writes the permanent memory, and the program with the largest use.
fn write_memory(text: &mut String, memory: &Memory) {
    let state = memory.state.iter().map(|(what, size)| format!("{what} {}", bytes(*size))).collect::<Vec<_>>();
    let _ = writeln!(text, "Kept between programs: {}.", state.join(", "));
    let remark = match memory.total_bytes_without_roll_back {
        same if same == memory.total_bytes => String::new(),
        less => format!(" ({} without the copy for a rollback)", bytes(less)),
    };
    let _ = writeln!(text, "Most is on the device during {}: {}{remark}.\n", memory.largest, bytes(memory.total_bytes));
}

fn write_times(text: &mut String, times: &Times) {
    let mut table = Sheet::new(["", "time", "share"], 1..3).named();
    for (what, seconds) in &times.shares {
        table.row([what.clone(), milliseconds(*seconds), format!("{:.1} %", 100.0 * seconds / times.update_seconds)]);
    }
    let _ = write!(
        text,
        "An update: {}, {:.0} tokens/s, {:.1} % of the peak\n\n{}\n\nA rollout: {:.0} ms, {:.2} ms per token of every sequence, {:.0} tokens/s\n\
         A step with rollout, scores and update: {:.0} ms\n\n",
        milliseconds(times.update_seconds),
        times.update_tokens_per_second,
        100.0 * times.utilisation,
        table.text(),
        1e3 * times.rollout_seconds,
        1e3 * times.token_seconds,
        times.rollout_tokens_per_second,
        1e3 * times.step_seconds,
    );
}
