//! `grpo bench`: variants of the loss on devices that are here, measured in one run.

use super::bench_layers::resolve;
use super::{Outcome, bench_text, emit};
use anyhow::Context;
use backend_tpu::plugins::Kind;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use trainer::bench::measure::Rounds;
use trainer::bench::report;
use trainer::bench::{self, Options};
use trainer::config_layers::to_yaml;

/// Arguments of `grpo bench`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "All variants have the same inputs and take turns. A floor, the bare products that the result needs, takes \
    turns with them. The exit code is 1 when a variant could not be measured; one that the backend does not offer counts \
    only if it was named."
)]
pub(crate) struct Args {
    /// YAML or JSON file, as in configs/bench/ [default: the built-in configs/bench/fused.yaml].
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    set: Vec<String>,
    /// Print the resolved configuration as YAML and exit.
    #[arg(long)]
    print_config: bool,
    /// Devices: pjrt:cpu, pjrt:tpu, pjrt:cuda.
    #[arg(long, required_unless_present = "print_config", default_value = "", hide_default_value = true)]
    backend: String,
    /// The PJRT plugin, instead of GRPO_PJRT_PLUGIN or the installed one.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Measure only this variant; repeatable.
    #[arg(long, value_name = "NAME")]
    variant: Vec<String>,
    /// Timed steps of each variant.
    #[arg(long, default_value_t = 20, allow_negative_numbers = true)]
    steps: usize,
    /// Steps before them, after the first call.
    #[arg(long, default_value_t = 3, allow_negative_numbers = true)]
    warmup: usize,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// Print one JSON document instead of a table.
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print the table in Markdown.
    #[arg(long)]
    markdown: bool,
    /// Write the JSON document to this file, whatever is printed.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let config = resolve(args.config.as_deref(), &args.set)?;
    if args.print_config {
        emit(&to_yaml(&config)?)?;
        return Ok(Outcome::Done);
    }
    let options = Options {
        kind: kind(&args.backend)?,
        plugin: args.plugin,
        variants: args.variant,
        rounds: Rounds { warmup: args.warmup, steps: args.steps },
        seed: args.seed,
    };
    // Minutes pass; a person who waits is told, a script is not.
    let shows = std::io::stderr().is_terminal();
    let document = bench::run(&config, &options, |what| {
        tracing::info!("{what}");
        if shows {
            let _ = writeln!(std::io::stderr(), "{what} ...");
        }
    })?;
    let json = format!("{}\n", serde_json::to_string_pretty(&document)?);
    if let Some(path) = &args.output {
        std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    emit(&if args.json { json } else { bench_text::text(&document, args.markdown) })?;
    let is_missing = |name: &String| matches!(document.variants.get(name), Some(report::Outcome::NotOffered { .. }));
    let failed = document.has_failures() || options.variants.iter().any(is_missing);
    Ok(if failed { Outcome::CheckFailed } else { Outcome::Done })
}

/// Reads `pjrt:cuda`.
fn kind(name: &str) -> trainer::Result<Kind> {
    let kind = Kind::ALL.into_iter().find(|kind| name.strip_prefix("pjrt:") == Some(kind.name()));
    kind.ok_or_else(|| trainer::Error::Argument {
        operation: "bench",
        expected: "a backend that benchmarks run on (pjrt:cpu, pjrt:tpu, pjrt:cuda)".into(),
        found: format!("`{name}`"),
    })
}
