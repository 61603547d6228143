//! `grpo plan` of a benchmark: the largest tile of the loss that fits into a device's memory.

use crate::estimates::{bytes, milliseconds, tiles};
use crate::output::{Outcome, emit, emit_document, emit_json};
use crate::plan_args::Args;
use crate::table::Sheet;
use anyhow::Context;
use grpo_backend_tpu::aot::{Fit, Report};
use grpo_backend_tpu::program::Blocking;
use grpo_files::to_yaml;
use serde_json::json;

/// The default variant.
const VARIANT: &str = "fused";

pub(crate) fn run(args: &Args) -> anyhow::Result<Outcome> {
    let config = args.bench.resolve()?;
    if args.bench.print_config {
        emit_document(&to_yaml(&config)?)?;
        return Ok(Outcome::Done);
    }
    let target = args.bench.target()?;
    let memory = args.hbm.unwrap_or(target.chip().usable_memory);
    let name = target.name().to_owned();
    let compiler = args.bench.compiler(target, args.recompile)?;
    let chosen = args.variant.as_deref().unwrap_or(VARIANT);
    let variant = config.variant(chosen)?;
    let fit = compiler.fit(&variant, memory).with_context(|| format!("variant `{chosen}`"))?;
    let line = fit.best.blocking.map(|blocking| line(blocking, fit.best.temp_bytes));
    if args.json {
        emit_json(&json!({
            "target": name,
            "memory_bytes": memory,
            "variant": chosen,
            "config_line": line,
            "best": fit.best,
            "neighbours": fit.neighbours,
        }))?;
    } else {
        let title = format!("{}, variant `{chosen}` on {name} with {}", config.name, bytes(memory));
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
