//! `grpo gradcheck`: checks gradients on reduced problems of a benchmark.

use crate::bench_layers::BenchFiles;
use crate::output::{Outcome, emit, emit_json};
use crate::parity::table;
use grpo_bench::config::ShapeConfig;
use grpo_check::gradcheck::{self, CaseReport, Limits, Options};
use grpo_files::counted;
use std::path::PathBuf;

/// Arguments of `grpo gradcheck`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Gradients of the f64 oracle are compared with central differences of its loss, and loss, log-probabilities, \
    entropies and gradients of every variant with the oracle, on the benchmark's inputs. Sizes are reduced, because a difference needs \
    two dense f64 evaluations per entry. The exit code is 1 if a result is out of tolerance, if an expected \
    gradient is zero everywhere, or if nothing was checked; a variant that the backend does not offer counts only if it \
    was named."
)]
pub(crate) struct Args {
    #[command(flatten)]
    files: BenchFiles,
    /// The PJRT plugin [default: what GRPO_PJRT_PLUGIN names, or what `grpo plugin install` has installed].
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Check only these, e.g. fused,score; repeatable.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variants: Vec<String>,
    /// Seed of the inputs. If no token of a clip branch is active with it, later seeds are tried [default: the configuration's].
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Maximum number of tokens of a sequence.
    #[arg(long, value_name = "T", default_value_t = Limits::default().tokens)]
    max_tokens: usize,
    /// Maximum hidden size.
    #[arg(long, value_name = "H", default_value_t = Limits::default().hidden)]
    max_hidden: usize,
    /// Maximum vocabulary size.
    #[arg(long, value_name = "V", default_value_t = Limits::default().vocab)]
    max_vocab: usize,
    /// Print one JSON document instead of tables.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let limits = Limits { tokens: args.max_tokens, hidden: args.max_hidden, vocab: args.max_vocab };
    let options = Options { limits, variants: args.variants, plugin: args.plugin };
    let configs = args.files.resolve(|config| {
        config.inputs.seed = args.seed.unwrap_or(config.inputs.seed);
        Ok(())
    })?;
    let Some(configs) = configs else { return Ok(Outcome::Done) };
    let mut cases = vec![];
    let (bar, mut tell) = crate::bench::progress();
    for config in &configs {
        cases.extend(gradcheck::run(config, &options, |what| tell(what))?);
    }
    bar.finish_and_clear();
    let passed = cases.iter().all(|case| case.passed);
    if args.json {
        emit_json(&serde_json::json!({ "passed": passed, "limits": limits, "cases": cases }))?;
    } else {
        emit(&text(&cases, passed))?;
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn text(cases: &[CaseReport], passed: bool) -> String {
    let mut out = String::new();
    for case in cases {
        out.push_str(&format!("{}: {}\n", case.name, sizes(&case.shape)));
        if let Some(asked) = &case.reduced_from {
            let options = "--max-tokens, --max-hidden and --max-vocab allow more";
            out.push_str(&format!("reduced from {}: {options}\n", sizes(asked)));
        }
        for inputs in &case.inputs {
            let bias = if inputs.bias { ", with a bias" } else { "" };
            out.push_str(&format!("inputs in {}{bias}\n{}\n", inputs.dtype.name(), table(&inputs.rows)));
            if inputs.kinks > 0 {
                let steps = counted(inputs.kinks, "step of differences");
                let (cross, they) = if inputs.kinks == 1 { ("crosses", "it keeps") } else { ("cross", "they keep") };
                out.push_str(&format!(
                    "note: {steps} {cross} a kink of the loss: there, {they} to the gradient's branch\n"
                ));
            }
            for note in &inputs.notes {
                out.push_str(&format!("note: {note}\n"));
            }
        }
        for (name, why) in &case.not_checked {
            out.push_str(&format!("note: {name} was not checked: {why}\n"));
        }
        for failure in &case.failures {
            out.push_str(&format!("FAIL: {failure}\n"));
        }
        out.push('\n');
    }
    let rows = || cases.iter().flat_map(|case| &case.inputs).flat_map(|inputs| &inputs.rows);
    out.push_str(&format!(
        "{}: {}, {}, {} out of tolerance, {}\n",
        if passed { "PASS" } else { "FAIL" },
        counted(cases.len(), "problem"),
        counted(rows().count(), "comparison"),
        rows().filter(|row| !row.passed).count(),
        counted(cases.iter().map(|case| case.failures.len()).sum::<usize>(), "other failure"),
    ));
    out
}

fn sizes(shape: &ShapeConfig) -> String {
    let ShapeConfig { batch, tokens, hidden, vocab } = shape;
    let hidden = hidden.map_or_else(|| "given logits".into(), |hidden| format!("hidden {hidden}"));
    format!("{batch} x {}, {hidden}, vocabulary {vocab}", counted(*tokens, "token"))
}
