//! Compiles variants of the loss and programs of runs in processes of their own.

use crate::bench_layers::BenchArgs;
use crate::compiling::{Compiling, Ended};
use anyhow::{Context, bail};
use grpo_backend_tpu::aot::Report;
use grpo_bench::assertion::Assertion;
use grpo_files as files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// The limit of concurrent compilers. Each takes about a gigabyte of memory and uses several threads.
const MOST_WORKERS: usize = 4;

/// Arguments of `grpo aot`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "CONFIG is a benchmark, as in configs/bench/, or the configuration of a run, as in configs/train/ and configs/aot/. The \
    programs of a run are compiled for its mesh, or for one device, without weights; a table shows the memory and time that they need. \
    Times are the compiler's estimates, with loop bodies multiplied by their iterations; bytes are the compiler's \
    allocations. An assertion is VARIANT.FIELD (<=|<|>=|>|==) NUMBER or VARIANT.FIELD, optionally `* NUMBER`, with the fields \
    of --json; the exit code is 1 if one does not hold."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) bench: BenchArgs,
    /// Compile only these variants of a benchmark or programs of a run, e.g. fused,reference or gradient,apply; repeatable.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) variants: Vec<String>,
    /// Print one JSON document instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Recompile instead of using cached results.
    #[arg(long)]
    pub(crate) recompile: bool,
    /// Write the StableHLO of each variant to DIR/NAME.mlir.
    #[arg(long, value_name = "DIR")]
    pub(crate) emit: Option<PathBuf>,
    /// Exit with 1 unless this holds, e.g. 'fused.temp_bytes <= 630e6'; repeatable.
    #[arg(long, value_name = "ASSERTION")]
    pub(crate) assert: Vec<String>,
    /// Compile one variant in this process and print its report, or without a variant print the processes of the target, for the parent process.
    #[arg(long, hide = true)]
    pub(crate) worker: bool,
}

/// The result of compiling a variant.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Compiled {
    /// The compiler's report.
    Report(Box<Report>),
    /// The variant did not compile.
    Failed {
        /// The error, on one line.
        error: String,
    },
}

impl From<anyhow::Result<Report>> for Compiled {
    fn from(result: anyhow::Result<Report>) -> Self {
        match result {
            Ok(report) => Self::Report(Box::new(report)),
            Err(error) => Self::Failed { error: format!("{error:#}") },
        }
    }
}

impl Compiled {
    /// Returns the compiler's report.
    pub(crate) fn report(&self) -> Option<&Report> {
        if let Self::Report(report) = self { Some(report) } else { None }
    }

    fn ended(&self) -> Ended {
        match self {
            Self::Report(report) if report.from_cache => Ended::FromCache,
            Self::Report(_) => Ended::Compiled,
            Self::Failed { .. } => Ended::Failed,
        }
    }
}

impl Args {
    /// Parses the assertions.
    pub(crate) fn assertions(&self) -> anyhow::Result<Vec<Assertion>> {
        Ok(self.assert.iter().map(|text| Assertion::parse(text)).collect::<Result<_, _>>()?)
    }

    /// Writes a program into the folder of `--emit`, if it was given.
    pub(crate) fn emit(&self, name: &str, program: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<()> {
        let Some(folder) = &self.emit else { return Ok(()) };
        Ok(files::write_output(&folder.join(format!("{name}.mlir")), program()?.as_bytes())?)
    }
}

/// Returns the first of the errors, if any.
pub(crate) fn expect_reports(what: &str, all: &BTreeMap<String, Compiled>) -> anyhow::Result<()> {
    let errors = all.iter().filter_map(|(name, compiled)| match compiled {
        Compiled::Failed { error } => Some(format!("{what} `{name}`: {error}")),
        Compiled::Report(_) => None,
    });
    match errors.collect::<Vec<_>>().as_slice() {
        [] => Ok(()),
        [first] => bail!("{first}"),
        [first, rest @ ..] => bail!("{first} (and {} more)", rest.len()),
    }
}

/// Compiles every variant or program, a few at a time. Creates the folder of `--emit` first. `suffix` follows each name while it is compiled.
pub(crate) fn compile_all(
    args: &Args,
    names: &[String],
    suffix: &str,
    compiling: &Compiling,
) -> anyhow::Result<BTreeMap<String, Compiled>> {
    if let Some(folder) = &args.emit {
        files::make_folder(folder)?;
    }
    let binary = std::env::current_exe().context("cannot find this binary")?;
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_WORKERS);
    let (queue, done) = (Mutex::new(names.iter()), Mutex::new(BTreeMap::new()));
    let locked = "no holder of this lock panics";
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(name) = { queue.lock().expect(locked).next() } {
                    let number = compiling.began(&format!("{name}{suffix}"), None);
                    let compiled = compile_elsewhere(&binary, args, name).unwrap_or_else(|error| Err(error).into());
                    compiling.ended(number, compiled.ended());
                    done.lock().expect(locked).insert(name.clone(), compiled);
                }
            });
        }
    });
    Ok(done.into_inner().expect(locked))
}

/// Runs the worker for one variant and parses its output.
fn compile_elsewhere(binary: &Path, args: &Args, name: &str) -> anyhow::Result<Compiled> {
    run_worker(binary, args, Some(name))
}

/// Runs a worker, for one variant or for the whole target, and parses its output.
pub(crate) fn run_worker<T: DeserializeOwned>(binary: &Path, args: &Args, variant: Option<&str>) -> anyhow::Result<T> {
    let BenchArgs { config, set, target, plugin, .. } = &args.bench;
    let mut command = Command::new(binary);
    command.arg("aot").args(config).args(["--worker", "--target", target]);
    if let Some(variant) = variant {
        command.args(["--variants", variant]);
    }
    for set in set {
        command.args(["--set", set]);
    }
    for (option, path) in [("--plugin", plugin), ("--emit", &args.emit)] {
        if let Some(path) = path {
            command.arg(option).arg(path);
        }
    }
    if args.recompile {
        command.arg("--recompile");
    }
    // Compilers write many logs, which are shown only with GRPO_LOG.
    let heard = std::env::var_os("GRPO_LOG").is_some();
    command.stdin(Stdio::null()).stderr(if heard { Stdio::inherit() } else { Stdio::piped() });
    let output = command.output().context("cannot start the compiler's process")?;
    serde_json::from_slice(&output.stdout).or_else(|_| {
        let log = String::from_utf8_lossy(&output.stderr);
        let last = log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        bail!("the compiler's process ended with {}: {last}", output.status)
    })
}
