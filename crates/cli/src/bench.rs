//! `grpo bench`: measures variants of the loss on this machine's devices, or a model on this CPU.

use crate::bench_layers::BenchFiles;
use crate::output::{Outcome, emit, emit_document};
use crate::progress::{fitted, phase_fields};
use crate::{bench_model, bench_text, terminal};
use anyhow::{Context, bail};
use console::Term;
use grpo_bench::assertion::Assertion;
use grpo_bench::config::BackendName;
use grpo_bench::model::ModelBenchConfig;
use grpo_bench::report::{self, Document};
use grpo_bench::{self as bench, Options, plot};
use grpo_files::{check_output, write_output};
use grpo_sinks::wandb::Mode as WandbMode;
use grpo_sinks::{LoggingConfig, WandbConfig};
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Arguments of `grpo bench`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "All variants of a problem get the same inputs and are measured in alternation, each in its own process. Floors \
    are measured in alternation with them: matmuls alone, or the peak rates of processor and memory. An assertion is VARIANT.FIELD \
    (<=|<|>=|>|==) NUMBER or VARIANT.FIELD, optionally `* NUMBER`, with the fields of --json; it is checked for \
    every problem with these variants, or for one as PROBLEM/VARIANT.FIELD. The exit code is 1 if a variant could not \
    be measured or an assertion does not hold; a variant that the backend does not offer counts only if it was named. \
    configs/bench/generate.yaml measures generation and optimizer steps of a model folder: its variants are the systems grpo, \
    transformers and vllm, and --backend, --plugin, --steps, --warmup, --seed and --plot do not apply."
)]
pub(crate) struct Args {
    #[command(flatten)]
    files: BenchFiles,
    /// Backend of variants that name none: cpu, pjrt:cpu, pjrt:tpu, pjrt:cuda [default: the configuration's].
    #[arg(long)]
    backend: Option<String>,
    /// The PJRT plugin [default: what GRPO_PJRT_PLUGIN names, or what `grpo plugin install` has installed].
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Measure only these, e.g. fused,torch_compile; repeatable.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variants: Vec<String>,
    /// Measure the peers too, with the packages of this Python virtual environment (see peers/README.md).
    #[arg(long, value_name = "DIR")]
    peers_venv: Option<PathBuf>,
    /// Measure vLLM too, with the packages of this Python virtual environment; only for a model.
    #[arg(long, value_name = "DIR")]
    vllm_venv: Option<PathBuf>,
    /// Timed steps of each variant; 0 plans and calls once [default: the configuration's].
    #[arg(long, allow_negative_numbers = true)]
    steps: Option<usize>,
    /// Untimed steps before them, after the first call [default: the configuration's].
    #[arg(long, allow_negative_numbers = true)]
    warmup: Option<usize>,
    /// Seed of the inputs [default: the configuration's].
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Exit with 1 unless this holds, e.g. 'fused.step_ms.p50 < reference.step_ms.p50'; repeatable.
    #[arg(long, value_name = "ASSERTION")]
    assert: Vec<String>,
    /// Print one JSON document instead of tables.
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Print the tables in Markdown.
    #[arg(long)]
    markdown: bool,
    /// Also write the JSON document to this file.
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Log every variant's numbers as a run's metrics in this folder, which must be new: PROBLEM/VARIANT/metrics.jsonl, and the files
    /// of `logging` and `wandb` of the configuration.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Draw time against memory into this file, which must end in .svg.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    if let Some(config) = args.files.of_model()? {
        return run_model(&config, &args);
    }
    if args.vllm_venv.is_some() {
        bail!("--vllm-venv: only the benchmark of a model has vLLM, see configs/bench/generate.yaml");
    }
    let configs = args.files.resolve(|config| {
        if let Some(backend) = &args.backend {
            BackendName::parse("--backend", backend)?;
            config.backend.clone_from(backend);
        }
        config.rounds.steps = args.steps.unwrap_or(config.rounds.steps);
        config.rounds.warmup = args.warmup.unwrap_or(config.rounds.warmup);
        config.inputs.seed = args.seed.unwrap_or(config.inputs.seed);
        Ok(())
    })?;
    let Some(configs) = configs else { return Ok(Outcome::Done) };
    if let Some(path) = args.plot.as_ref().filter(|path| path.extension().is_none_or(|ending| ending != "svg")) {
        bail!("--plot: expected a file that ends in .svg, got {}", path.display());
    }
    let sections = configs.iter().map(|config| (&config.logging, &config.wandb));
    args.check_files(sections)?;
    let options = args.options()?;
    let document = measured(|progress| bench::run(&configs, &options, progress))?;
    args.publish(&document, &bench_text::text(&document, args.markdown))?;
    if let Some(folder) = &args.log_dir {
        bench::log::write(&document, folder, note)?;
    }
    if let Some(path) = &args.plot {
        write_output(path, plot::svg(&document).as_bytes())?;
    }
    let is_missing = |name: &String| {
        document.cases.iter().filter_map(|case| case.variants.get(name)).any(report::Outcome::is_not_offered)
    };
    Ok(outcome(document.has_failures() || args.variants.iter().any(is_missing), &document))
}

/// Measures a model.
fn run_model(config: &ModelBenchConfig, args: &Args) -> anyhow::Result<Outcome> {
    for (option, is_set) in [
        ("--backend", args.backend.is_some()),
        ("--plugin", args.plugin.is_some()),
        ("--steps", args.steps.is_some()),
        ("--warmup", args.warmup.is_some()),
        ("--seed", args.seed.is_some()),
        ("--plot", args.plot.is_some()),
    ] {
        if is_set {
            bail!(
                "{option}: expected a benchmark of the loss, got one of a model, whose measurements `--set rounds=N` repeats"
            );
        }
    }
    if args.files.is_printed(config)? {
        return Ok(Outcome::Done);
    }
    args.check_files(std::iter::once((&config.logging, &config.wandb)))?;
    let options = args.options()?;
    let document = measured(|progress| bench::model::run(config, &options, progress))?;
    args.publish(&document, &bench_model::text(&document, config, args.markdown))?;
    if let Some(folder) = &args.log_dir {
        bench::log::write_model(&document, config, folder, note)?;
    }
    let outcomes = document.cases.iter().flat_map(|case| &case.variants);
    let failed = outcomes
        .into_iter()
        .any(|(name, outcome)| outcome.is_failure() || outcome.is_not_offered() && args.variants.contains(name));
    Ok(outcome(failed, &document))
}

impl Args {
    /// Checks the files of results before minutes are spent on them; `sections` are `logging` and `wandb` of every configuration.
    fn check_files<'a>(
        &self,
        mut sections: impl Iterator<Item = (&'a LoggingConfig, &'a WandbConfig)>,
    ) -> anyhow::Result<()> {
        match &self.log_dir {
            Some(folder) => {
                sections.try_for_each(|(_, wandb)| wandb.validate())?;
                bench::log::make_folder(folder)?;
            }
            None => {
                let asks = |(logging, wandb): (&LoggingConfig, &WandbConfig)| {
                    logging.tensorboard || wandb.mode.is_some_and(|mode| mode != WandbMode::Disabled)
                };
                if sections.any(asks) {
                    bail!("logging.tensorboard and wandb.mode need a folder for their files: name it with --log-dir");
                }
            }
        }
        self.out.iter().chain(&self.plot).try_for_each(|path| check_output(path))?;
        Ok(())
    }

    fn options(&self) -> anyhow::Result<Options> {
        Ok(Options {
            worker: vec![std::env::current_exe().context("cannot find this binary")?.into(), "bench-worker".into()],
            plugin: self.plugin.clone(),
            variants: self.variants.clone(),
            peers_venv: self.peers_venv.clone(),
            vllm_venv: self.vllm_venv.clone(),
            assertions: self.assert.iter().map(|text| Assertion::parse(text)).collect::<Result<_, _>>()?,
        })
    }

    /// Prints the results, as JSON or as `text`, and writes the JSON document to the file that was named.
    fn publish<C: Serialize>(&self, document: &Document<C>, text: &str) -> anyhow::Result<()> {
        let json = format!("{}\n", serde_json::to_string_pretty(document)?);
        // Results are printed even if a file cannot be written, and the file is written even if standard output is full.
        let printed = if self.json { emit_document(&json) } else { emit(text) };
        if let Some(path) = &self.out {
            write_output(path, json.as_bytes())?;
        }
        printed
    }
}

/// Calls `run` with a function that shows the progress, and stops on a signal.
fn measured<T>(run: impl FnOnce(&mut dyn FnMut(&str) -> bench::Result<()>) -> bench::Result<T>) -> anyhow::Result<T> {
    let (bar, mut tell) = progress();
    let stop = crate::signals::stop_on_signal("stopping after this step", &Arc::new(true.into()))?;
    let document = run(&mut |what| {
        tell(what);
        if stop.load(Ordering::Relaxed) { Err(bench::Error::Stopped) } else { Ok(()) }
    });
    bar.finish_and_clear();
    Ok(document?)
}

fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn outcome<C>(failed: bool, document: &Document<C>) -> Outcome {
    let holds = document.assertions.iter().all(|claim| claim.checked.holds);
    if failed || !holds { Outcome::CheckFailed } else { Outcome::Done }
}

/// Shows progress: the current step on a terminal; in a log, a line for each phase.
pub(super) fn progress() -> (ProgressBar, impl FnMut(&str)) {
    let bar = ProgressBar::new_spinner();
    let current = Arc::new(Mutex::new(String::new()));
    let line_text = Arc::clone(&current);
    let line = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let elapsed = format!("{:#}", HumanDuration(state.elapsed()));
        let fields = phase_fields(&elapsed, &line_text.lock().unwrap_or_else(PoisonError::into_inner));
        // Leaves room for the spinner and a space. Errors of writing to a terminal are ignored.
        let _ = out.write_str(&fitted(&fields, terminal::of(&Term::stderr()).saturating_sub(2)));
    };
    if let Ok(style) = ProgressStyle::with_template("{spinner} {line}") {
        bar.set_style(style.with_key("line", line));
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    let (shown, mut last) = (bar.clone(), String::new());
    let tell = move |what: &str| {
        tracing::info!("{what}");
        what.clone_into(&mut current.lock().unwrap_or_else(PoisonError::into_inner));
        // Removes the name from `CASE: round 3 of 10: NAME`.
        let phase = what.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": ");
        if shown.is_hidden() && phase != last {
            // Errors of writing are ignored.
            let _ = writeln!(std::io::stderr(), "{phase}");
            last = phase;
        }
    };
    (bar, tell)
}
