//! Formats measurements as tables of at most 100 columns, or as lists on narrower terminals.

use crate::estimates::{bytes, tiles};
use crate::table::Sheet;
use grpo_bench::report::{Case, Claim, Document, Machine, Measured, Outcome};
use grpo_files::counted;
use std::collections::BTreeSet;
use std::fmt::Write;

const TIMES: [&str; 9] = ["variant", "min", "p50", "p90", "mean", "tokens/s", "TFLOP/s", "x floor", "of floor"];
const MEMORY: [&str; 8] = ["variant", "tiles", "inputs", "outputs", "planned", "high water", "plan s", "first s"];

/// Returns the lines about program and machine.
pub(crate) fn heading<C>(document: &Document<C>) -> String {
    let Machine { cpu, threads, system, huge_pages } = &document.machine;
    let huge_pages = huge_pages.as_ref().map(|when| format!(", huge pages: {when}")).unwrap_or_default();
    let threads = counted(*threads, "thread");
    let cpu = cpu.as_deref().unwrap_or(system);
    format!("grpo {}, {}\n{threads} of {cpu}{huge_pages}\n", document.version, document.date)
}

/// Returns a line for each assertion.
pub(crate) fn verdicts(claims: &[Claim]) -> String {
    let line = |Claim { case, checked }: &Claim| {
        let case = case.as_ref().map(|case| format!("{case}: ")).unwrap_or_default();
        format!("{}: {case}{checked}\n", checked.verdict())
    };
    claims.iter().map(line).collect()
}

/// Returns the tables, with the settings needed to repeat the measurement.
pub(crate) fn text(document: &Document, markdown: bool) -> String {
    let mut text = heading(document);
    for case in &document.cases {
        problem(&mut text, case, markdown);
    }
    text.push_str(
        "\nTimes of a step are in ms. TFLOP/s counts the matmuls that a result needs; of a floor, all that\n\
         it does. Planned is what the plan or the compiler allots beside inputs and outputs; high water is\n\
         what was there at most during a step beyond them, measured. First s is the first call.\n",
    );
    text.push_str(&verdicts(&document.assertions));
    text
}

fn problem(text: &mut String, case: &Case, markdown: bool) {
    let (shape, config) = (case.config.shape, &case.config);
    let hidden = shape.hidden.map(|hidden| format!("H {hidden}, ")).unwrap_or_default();
    let _ = writeln!(
        text,
        "\n{} (B {}, T {}, {hidden}V {}, {}): {} in turns after {} and a first call, seed {}",
        case.name,
        shape.batch,
        shape.tokens,
        shape.vocab,
        config.dtype.name(),
        counted(case.rounds.steps, "timed step"),
        case.rounds.warmup,
        config.inputs.seed,
    );
    for (backend, device) in &case.devices {
        let version = device.platform_version.lines().next().unwrap_or_default();
        let _ = writeln!(text, "{backend}: {} x {}, {version}", device.used, device.kind);
    }
    let versions = case.variants.values().filter_map(|outcome| match outcome {
        Outcome::Measured(measured) => measured.version.as_deref(),
        _ => None,
    });
    let versions: BTreeSet<&str> = versions.collect();
    if !versions.is_empty() {
        let _ = writeln!(text, "peers: {}", versions.into_iter().collect::<Vec<_>>().join(", "));
    }
    let table = |header: &[&str], row: &dyn Fn(&str, &Measured) -> Vec<String>, first_number: usize| {
        let mut table = Sheet::new(header.iter().copied(), first_number..header.len()).named();
        for (name, outcome) in sorted(case) {
            match outcome {
                Outcome::Measured(measured) => table.row(row(name, measured)),
                Outcome::Failed { .. } => table.row([name, "failed"]),
                Outcome::NotOffered { .. } => table.row([name, "not offered"]),
            }
        }
        if markdown { table.markdown() } else { table.text() }
    };
    let _ = writeln!(text, "\n{}\n\n{}", table(&TIMES, &times, 1), table(&MEMORY, &memory, 2));
    for (name, outcome) in sorted(case) {
        if let Outcome::Measured(measured) = outcome
            && !measured.work_shares.is_empty()
        {
            let mut shares: Vec<_> = measured.work_shares.iter().collect();
            shares.sort_by(|a, b| b.1.total_cmp(a.1));
            let shares: Vec<_> =
                shares.iter().map(|(work, share)| format!("{work} {:.1} %", 100.0 * **share)).collect();
            let _ = writeln!(text, "{name} spends its threads' time on {}", shares.join(", "));
        }
        match outcome {
            Outcome::Failed { error } | Outcome::NotOffered { error } => {
                let _ = writeln!(text, "{name}: {}", error.lines().next().unwrap_or_default());
            }
            Outcome::Measured(measured) if measured.agrees == Some(false) => {
                let loss = measured.loss.unwrap_or(f64::NAN);
                let norms = measured.grad_norms.iter().map(|(of, norm)| format!(", |d{of}| {norm:.4}"));
                let _ = writeln!(text, "! {name} does not agree: loss {loss:.5}{}", norms.collect::<String>());
            }
            Outcome::Measured(_) => {}
        }
    }
}

/// Returns floors, then variants by time, then outcomes without a time.
fn sorted(case: &Case) -> impl Iterator<Item = (&str, &Outcome)> {
    let time = |outcome: &Outcome| match outcome {
        Outcome::Measured(measured) => measured.step_ms.as_ref().map_or(f64::INFINITY, |timing| timing.p50),
        _ => f64::INFINITY,
    };
    let mut variants: Vec<_> = case.variants.iter().collect();
    variants.sort_by(|a, b| time(a.1).total_cmp(&time(b.1)));
    case.floors.iter().chain(variants).map(|(name, outcome)| (name.as_str(), outcome))
}

/// Returns the name, marked if its results differ from the others.
fn marked(name: &str, measured: &Measured) -> String {
    if measured.agrees == Some(false) { format!("! {name}") } else { name.to_owned() }
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

fn times(name: &str, measured: &Measured) -> Vec<String> {
    let step = measured.step_ms.as_ref();
    let time = |milliseconds: Option<f64>| or_dash(milliseconds.map(|ms| format!("{ms:.*}", digits(ms))));
    let rate = match measured.rate_per_second {
        Some(rate) if measured.rate_of == Some("B") => format!("{:.1} GB/s", rate / 1e9),
        Some(rate) => format!("{:.3}", rate / 1e12),
        None => or_dash(measured.useful_flops_per_second.map(|rate| format!("{:.3}", rate / 1e12))),
    };
    vec![
        marked(name, measured),
        time(step.map(|s| s.min)),
        time(step.map(|s| s.p50)),
        time(step.map(|s| s.p90)),
        time(step.map(|s| s.mean)),
        or_dash(measured.tokens_per_second.map(|rate| format!("{rate:.0}"))),
        rate,
        or_dash(measured.times_floor.map(|times| format!("{times:.2}"))),
        or_dash(measured.share_of_floor.map(|share| format!("{:.1} %", 100.0 * share))),
    ]
}

/// Returns the number of decimals for four digits in total, three at most.
fn digits(milliseconds: f64) -> usize {
    (3.0 - milliseconds.max(1e-9).log10().floor()).clamp(0.0, 3.0) as usize
}

fn memory(name: &str, measured: &Measured) -> Vec<String> {
    let size = |size: Option<u64>| or_dash(size.map(bytes));
    let step = measured.bytes;
    vec![
        marked(name, measured),
        tiles(measured.blocking),
        size(step.planned.inputs),
        size(step.planned.outputs),
        size(step.planned.workspace),
        size(step.high_water),
        format!("{:.2}", measured.plan_seconds),
        format!("{:.2}", measured.first_call_seconds),
    ]
}
