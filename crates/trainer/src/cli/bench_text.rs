//! What was measured, as a table.

use super::aot_text::{STYLE, align_right, bytes, milliseconds, tiles};
use comfy_table::{Table, presets};
use std::fmt::Write;
use trainer::bench::report::{Document, Measured, Outcome};

const HEADER: [&str; 13] = [
    "variant",
    "tiles",
    "min",
    "p50",
    "p90",
    "mean",
    "tokens/s",
    "TFLOP/s",
    "x floor",
    "temp",
    "high water",
    "compile",
    "first call",
];

/// The table with what one needs to know to repeat it.
pub(crate) fn text(document: &Document, markdown: bool) -> String {
    let mut table = Table::new();
    table.load_style(if markdown { presets::ASCII_MARKDOWN } else { STYLE });
    table.set_header(HEADER);
    let all = || document.floors.iter().chain(&document.variants);
    for (name, outcome) in all() {
        match outcome {
            Outcome::Measured(measured) => table.add_row(row(name, measured)),
            Outcome::Failed { .. } => table.add_row([name.as_str(), "failed"]),
            Outcome::NotOffered { .. } => table.add_row([name.as_str(), "not offered"]),
        };
    }
    align_right(&mut table, 2..HEADER.len());
    let (device, machine, rounds) = (&document.device, &document.machine, document.rounds);
    let shape = document.config.shape;
    let mut text = format!(
        "{} (B {}, T {}, {}V {}, {}) on {} x {} ({}), grpo {}, {}\n",
        document.config.name,
        shape.batch,
        shape.tokens,
        shape.hidden.map(|hidden| format!("H {hidden}, ")).unwrap_or_default(),
        shape.vocab,
        document.config.dtype.name(),
        device.used,
        device.kind,
        document.backend,
        document.version,
        document.date
    );
    let _ = writeln!(
        text,
        "{}; {} threads of {}; {} timed steps in turns after {} and a first call, seed {}\n",
        device.platform_version.lines().next().unwrap_or_default(),
        machine.threads,
        machine.cpu.as_deref().unwrap_or(&machine.system),
        rounds.steps,
        rounds.warmup,
        document.seed,
    );
    let _ = writeln!(text, "{table}\n");
    text.push_str(
        "TFLOP/s counts the products that the result needs. Temp is what the compiler has allotted beside arguments and \
         results; high water is what the device's allocator saw of a step above what was there before.\n",
    );
    for (name, outcome) in all() {
        if let Outcome::Failed { error } | Outcome::NotOffered { error } = outcome {
            let _ = writeln!(text, "{name}: {}", error.lines().next().unwrap_or_default());
        }
    }
    text
}

fn row(name: &str, measured: &Measured) -> [String; 13] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let seconds = measured.seconds.as_ref();
    let time = |seconds: Option<f64>| or_dash(seconds.map(milliseconds));
    let useful = measured.useful_flops_per_second.filter(|rate| *rate > 0.0);
    [
        name.to_owned(),
        tiles(measured.blocking),
        time(seconds.map(|s| s.min)),
        time(seconds.map(|s| s.p50)),
        time(seconds.map(|s| s.p90)),
        time(seconds.map(|s| s.mean)),
        or_dash(measured.tokens_per_second.map(|rate| format!("{rate:.0}"))),
        or_dash(useful.map(|rate| format!("{:.2}", rate / 1e12))),
        or_dash(measured.times_floor.map(|times| format!("{times:.2}"))),
        or_dash(measured.compiled_bytes.map(|compiled| bytes(compiled.temp))),
        or_dash(measured.device_bytes.and_then(|device| device.step).map(bytes)),
        format!("{:.1} s", measured.compile_seconds),
        format!("{:.1} s", measured.first_call_seconds),
    ]
}
