//! `grpo aot`: compiles the loss of a benchmark or the programs of a run for absent devices, and reports memory and estimated times.
//!
//! Every variant or program is compiled in its own process (this binary with `--worker`), because a compiler that aborts ends its
//! process.

use crate::aot_worker::{Args, Compiled, compile_all, expect_reports};
use crate::compiling::Compiling;
use crate::output::{Outcome, emit, emit_document, emit_json};
use crate::{aot_run, aot_text};
use anyhow::bail;
use grpo_backend_tpu::aot::{Chip, Report, Target};
use grpo_bench::assertion::{Assertion, Checked};
use grpo_bench::config::BenchConfig;
use grpo_files::to_yaml;
use serde::Serialize;
use std::collections::BTreeMap;

/// Everything that `--json` shows.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    /// The name of the configuration.
    pub(crate) name: String,
    /// The target as the command line names it.
    pub(crate) target: String,
    /// One device of the target, for which the floors are computed.
    pub(crate) chip: Chip,
    /// The reports by the name of the variant.
    pub(crate) variants: BTreeMap<String, Compiled>,
    /// The assertions in the order given, with their outcome.
    pub(crate) assertions: Vec<Checked>,
}

pub(crate) fn run(args: Args, compiling: &Compiling) -> anyhow::Result<Outcome> {
    if args.worker {
        // The parent process shows the progress.
        compiling.silence();
    }
    if aot_run::is_run(&args.bench)? {
        return aot_run::run(args, compiling);
    }
    let config = args.bench.resolve()?;
    if args.bench.print_config {
        emit_document(&to_yaml(&config)?)?;
        return Ok(Outcome::Done);
    }
    let target = args.bench.target()?;
    if args.worker {
        emit_document(&serde_json::to_string(&Compiled::from(worker(&args, &config, target)))?)?;
        return Ok(Outcome::Done);
    }

    let assertions = args.assertions()?;
    let names = chosen(&args, &config)?;
    for variant in assertions.iter().flat_map(Assertion::variants) {
        if !names.iter().any(|name| name == variant) {
            bail!("an assertion names the variant `{variant}`; compiled variants: {}", names.join(", "));
        }
    }
    compiling.expect(names.len());
    let variants = compile_all(&args, &names, "", compiling)?;
    let values = serde_json::to_value(&variants)?;
    let assertions = assertions.iter().map(|a| a.check(&values)).collect::<Result<Vec<_>, _>>()?;
    let holds = assertions.iter().all(|a| a.holds);
    let (name, chip) = (config.name, target.chip());
    let document = Document { name, target: target.name().into(), chip, variants, assertions };
    if args.json {
        emit_json(&document)?;
    } else {
        emit(&aot_text::text(&document))?;
    }
    expect_reports("variant", &document.variants)?;
    Ok(if holds { Outcome::Done } else { Outcome::CheckFailed })
}

/// Returns the variants to compile, in order; each has a program.
fn chosen(args: &Args, config: &BenchConfig) -> anyhow::Result<Vec<String>> {
    for name in &args.variants {
        config.variant(name)?;
    }
    let is_chosen = |name: &&str| args.variants.is_empty() || args.variants.iter().any(|v| v == name);
    let names: Vec<String> = config.names().into_iter().filter(is_chosen).map(str::to_owned).collect();
    names.iter().try_for_each(|name| config.check(name))?;
    Ok(names)
}

/// Compiles the one variant that is named.
fn worker(args: &Args, config: &BenchConfig, target: Target) -> anyhow::Result<Report> {
    let [name] = args.variants.as_slice() else { bail!("--worker takes one of --variants") };
    let variant = config.variant(name)?;
    let report = args.bench.compiler(target, args.recompile)?.report(&variant)?;
    args.emit(name, || {
        let mut spec = variant.spec()?;
        spec.blocking = report.blocking.unwrap_or(spec.blocking);
        Ok(variant.program(&spec)?.module.to_string())
    })?;
    Ok(report)
}
