//! Formats the benchmark of a model as a table for generation and one for updates.

use crate::bench_text::{heading, verdicts};
use crate::table::Sheet;
use grpo_bench::measure::Spread;
use grpo_bench::model::{ModelBenchConfig, ModelCase, Work};
use grpo_bench::report::{Document, Outcome};
use grpo_files::counted;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A column: its header and its number.
type Column = (&'static str, &'static str);

const GENERATION: [Column; 4] = [
    ("first token s", "first_token_s"),
    ("tokens/s", "tokens_per_s"),
    ("tokens per processor s", "tokens_per_processor_s"),
    ("peak MiB", "peak_bytes"),
];
const UPDATE: [Column; 5] = [
    ("step s", "step_s"),
    ("processor s", "processor_s"),
    ("tokens/s", "tokens_per_s"),
    ("mfu", "mfu"),
    ("peak MiB", "peak_bytes"),
];

/// Returns the tables, with the settings needed to repeat the measurement.
pub(crate) fn text(document: &Document<ModelCase>, config: &ModelBenchConfig, markdown: bool) -> String {
    let mut text = heading(document);
    let model = config.model.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let threads = if config.threads == 0 { "one thread per core".into() } else { counted(config.threads, "thread") };
    let rounds = counted(config.rounds, "alternating round");
    let _ = writeln!(text, "{}: {model}, {threads}, {rounds}: median (smallest to largest)", config.name);
    if let Some(of) = &config.generation {
        let _ = writeln!(text, "\nGeneration of {} per sequence\n", counted(of.tokens, "token"));
        text.push_str(&table(document, &["rows", "prompt"], &GENERATION, markdown));
    }
    if config.update.is_some() {
        let _ = writeln!(text, "\nOptimizer step on all weights\n");
        text.push_str(&table(document, &["rows", "prompt", "completion", "micro-batches"], &UPDATE, markdown));
    }
    text.push_str(
        "\nRates of generation are of the time between the first token of the last row and the last token of the first\n\
         row. Processor seconds are of all threads. The floor is the larger of the weights' bytes over the bandwidth of\n\
         memory and the flops over the peak of multiply-adds, both measured; mfu is the share of that peak.\n",
    );
    for reason in reasons(document) {
        let _ = writeln!(text, "{reason}");
    }
    text.push_str(&verdicts(&document.assertions));
    text
}

/// Returns the table of the work whose sizes have as many numbers as there are names in `sizes`.
fn table(document: &Document<ModelCase>, sizes: &[&str], columns: &[Column], markdown: bool) -> String {
    let texts = sizes.len()..sizes.len() + 2;
    let header = sizes.iter().copied().chain(["dtype", "system"]).chain(columns.iter().map(|(header, _)| *header));
    let mut sheet = Sheet::new(header, texts.end..texts.end + columns.len());
    for case in &document.cases {
        let values = match case.work {
            Work::Generation { rows, prompt, .. } => vec![rows, prompt],
            Work::Update { rows, prompt, completion, micro_batches } => vec![rows, prompt, completion, micro_batches],
        };
        if values.len() != sizes.len() {
            continue;
        }
        let mut row = |system: &str, cells: Vec<String>| {
            let begin = values.iter().map(ToString::to_string).chain([case.dtype.name().into(), system.into()]);
            sheet.row(begin.chain(cells));
        };
        let cells = |numbers: &BTreeMap<&str, Spread>| -> Vec<String> {
            columns.iter().map(|(_, name)| numbers.get(name).map_or("".into(), |spread| cell(name, spread))).collect()
        };
        row("floor", cells(&case.floor));
        for (name, outcome) in &case.variants {
            match outcome {
                Outcome::Measured(measured) => row(name, cells(&measured.numbers)),
                Outcome::Failed { .. } => row(name, vec!["failed".into()]),
                Outcome::NotOffered { .. } => {}
            }
        }
    }
    format!("{}\n", if markdown { sheet.markdown() } else { sheet.text() })
}

/// Formats a number: the median, and the ends if they differ.
fn cell(name: &str, spread: &Spread) -> String {
    let number = |value: f64| match name {
        "peak_bytes" => format!("{:.0}", value / (1 << 20) as f64),
        _ => format!("{value:.*}", (2.0 - value.max(1e-9).log10().floor()).clamp(0.0, 6.0) as usize),
    };
    let [min, median, max] = [spread.min, spread.median, spread.max].map(number);
    if name == "peak_bytes" || min == max { median } else { format!("{median} ({min} to {max})") }
}

/// Returns the reasons why systems were not measured, each once.
fn reasons(document: &Document<ModelCase>) -> BTreeSet<String> {
    let outcomes = document.cases.iter().flat_map(|case| case.variants.iter().map(move |of| (&case.name, of)));
    let reason = |(case, (name, outcome)): (&String, (&String, &Outcome<_>))| match outcome {
        Outcome::Measured(_) => None,
        Outcome::Failed { error } => Some(format!("{name} on {case}: {error}")),
        Outcome::NotOffered { error } => Some(format!("{name}: {error}")),
    };
    outcomes.filter_map(reason).collect()
}
