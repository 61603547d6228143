//! The subcommand `grpo report`.

use crate::output::{Outcome, emit, emit_document, is_stdout};
use anyhow::{Context, bail};
use grpo_files::{check_output, counted, open_regular, write_output};
use grpo_report::Report;
use grpo_trainer::TrainConfig;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The default file name of the page.
const DEFAULT_OUT: &str = "report.html";
/// The number of bytes at the start of a page that identify its generator.
const HEAD: u64 = 4096;

/// Arguments of `grpo report`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The page needs no network and no other file. Run folders are not changed, so unfinished runs can be \
    shown. Unusable parts of files (an incomplete line, non-finite values) are listed on the page \
    and on standard error."
)]
pub(crate) struct Args {
    /// Run folders of `grpo train`; all runs are drawn into the same charts.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Where to write the page [default: report.html]. `-` is standard output; devices and pipes are written to directly; a file is replaced
    /// when the page is complete.
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Reads the runs, writes the page.
pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let out = args.out.clone().unwrap_or_else(|| DEFAULT_OUT.into());
    let to_stdout = is_stdout(&out);
    if args.out.is_none() && out.exists() && !is_page(&out) {
        bail!("{DEFAULT_OUT} exists and was not made by grpo: name another file with --out, or this one to replace it");
    }
    if !to_stdout {
        check_output(&out)?;
    }
    let defaults = serde_json::to_value(TrainConfig::default()).context("the default configuration")?;
    let report = Report::read(&args.runs)?.with_defaults(defaults);
    for note in report.notes() {
        tracing::warn!("{note}");
    }
    let page = report.html();
    if to_stdout {
        emit_document(&page)?;
        return Ok(Outcome::Done);
    }
    write_output(&out, page.as_bytes())?;
    let (count, size) = (report.names().count(), page.len().div_ceil(1000));
    let runs = counted(count, "run");
    let out = out.display();
    emit(&format!("wrote {out} ({runs}, {size} kB): open it in a browser\n"))
        .with_context(|| format!("the page {out} is complete"))?;
    Ok(Outcome::Done)
}

/// Returns `true` if `path` is a page of `grpo report`.
fn is_page(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = open_regular(path).and_then(|(file, _)| file.take(HEAD).read_to_end(&mut head));
    read.is_ok() && String::from_utf8_lossy(&head).contains("<meta name=\"generator\" content=\"grpo ")
}
