//! `grpo plan`: the largest tile that fits into a device's memory.

use crate::aot_text::{bytes, milliseconds, tiles};
use crate::bench_layers::BenchArgs;
use crate::table::Sheet;
use crate::{Outcome, emit, emit_document, emit_json};
use anyhow::Context;
use backend_tpu::aot::{Fit, Report};
use backend_tpu::program::Blocking;
use grpo_files::to_yaml;
use serde_json::json;

/// Arguments of `grpo plan`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Everything counts: arguments, results that are not aliased, temporaries and code. Times are the \
    compiler's estimates."
)]
pub(crate) struct Args {
    #[command(flatten)]
    bench: BenchArgs,
    /// Memory of a device that the loss may use, e.g. 32GiB, 15GB, 1000000 [default: the chip's].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    hbm: Option<u64>,
    /// The variant to plan.
    #[arg(long, value_name = "NAME", default_value = "fused")]
    variant: String,
    /// Print one JSON document instead of a table.
    #[arg(long)]
    json: bool,
    /// Recompile instead of using cached results.
    #[arg(long)]
    recompile: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let config = args.bench.resolve()?;
    if args.bench.print_config {
        emit_document(&to_yaml(&config)?)?;
        return Ok(Outcome::Done);
    }
    let target = args.bench.target()?;
    let memory = args.hbm.unwrap_or(target.chip().memory);
    let name = target.name().to_owned();
    let compiler = args.bench.compiler(target, args.recompile)?;
    let variant = config.variant(&args.variant)?;
    let fit = compiler.fit(&variant, memory).with_context(|| format!("variant `{}`", args.variant))?;
    let line = fit.best.blocking.map(|blocking| line(blocking, fit.best.temp_bytes));
    if args.json {
        emit_json(&json!({
            "target": name,
            "memory_bytes": memory,
            "variant": args.variant,
            "config_line": line,
            "best": fit.best,
            "neighbours": fit.neighbours,
        }))?;
    } else {
        let title = format!("{}, variant `{}` on {name} with {}", config.name, args.variant, bytes(memory));
        emit(&text(&title, &fit, memory, line.as_deref()))?;
    }
    Ok(Outcome::Done)
}

/// Returns the configuration lines that select this tile.
fn line(blocking: Blocking, temp: u64) -> String {
    let (key, size) = match blocking {
        Blocking::TokenChunks(size) => ("token_chunk", size),
        Blocking::VocabPanels(size) => ("vocab_block", size),
    };
    format!("tiling: {{ {key}: {size}, workspace_budget: {temp} }}")
}

fn text(title: &str, fit: &Fit, memory: u64, line: Option<&str>) -> String {
    let mut table = Sheet::new(["tiles", "total", "temp", "estimate", "floor", ""], 1..5).named();
    let mut reports: Vec<(&Report, &str)> = fit.neighbours.iter().map(|report| (report, "")).collect();
    reports.push((&fit.best, "fits"));
    reports.sort_by_key(|(report, _)| match report.blocking {
        Some(Blocking::TokenChunks(size) | Blocking::VocabPanels(size)) => size,
        None => 0,
    });
    for (report, note) in reports {
        table.row([
            tiles(report.blocking),
            bytes(report.total_bytes),
            bytes(report.temp_bytes),
            report.estimate_seconds.map_or("-".into(), milliseconds),
            milliseconds(report.floor.seconds),
            if report.total_bytes > memory { "does not fit".into() } else { note.to_owned() },
        ]);
    }
    let advice = line.map_or("there are no tiles to choose; it fits".into(), |line| format!("in the variant: {line}"));
    format!("{title}\n\n{}\n\n{advice}\nEstimates are the compiler's, not measurements.\n", table.text())
}

/// Parses a number of bytes such as `32GiB`, `15GB` or `1.5e9`.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        other => return Err(format!("`{other}` is no unit: use B, kB, MB, GB, KiB, MiB or GiB")),
    };
    match digits.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 && number * unit < 2f64.powi(63) => Ok((number * unit) as u64),
        _ => Err("expected a size above 0 such as 32GiB".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_sizes_are_parsed_with_units() {
        assert_eq!(
            ["32GiB", "15 GB", "1000", "1.5e3", "2kib"].map(size),
            [32 << 30, 15e9 as u64, 1000, 1500, 2048].map(Ok)
        );
        for text in ["", "GiB", "-1GB", "3 parsecs", "nanGB", "1e300GB", "0"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
