//! `grpo doctor`: what this machine and the environment offer, and what to do about problems.
//!
//! A check is a problem if something fails that is present or asked for: an installed plugin that does not load, a device of this machine
//! without a plugin, a cache that cannot be used, a hub that does not respond. A check is a note if a feature is off or slow. Checks that
//! wait for others run at the same time, each with a time limit.

mod check;
mod disk;
mod hub;
mod memory;
mod plugins;
mod processor;
mod python;
mod text;
mod threads;

use crate::output::{Outcome, emit_document, emit_json};
use anyhow::Context;
use check::{Check, Status};
use serde::Serialize;
use std::thread::{Builder, Scope};
use std::time::Duration;

/// Arguments of `grpo doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Makes one request to Hugging Face's hub, unless HF_HUB_OFFLINE is set, and asks pip's index for one package. \
    Exit codes: 0 without problems, 1 with problems; notes do not count."
)]
pub(crate) struct Args {
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    /// Time limit for each plugin, for Python and pip, and for the hub.
    #[arg(long, value_name = "SECONDS", default_value = "20")]
    time_limit: f64,
}

/// The document of `--json`.
#[derive(Serialize)]
struct Report {
    format: &'static str,
    version: &'static str,
    /// The operating system and the architecture.
    system: String,
    problems: usize,
    notes: usize,
    checks: Vec<Check>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let limit = Duration::try_from_secs_f64(args.time_limit).ok().filter(|limit| !limit.is_zero());
    let limit = limit.with_context(|| format!("--time-limit: expected seconds above 0, got {}", args.time_limit))?;
    let report = Report::make(limit);
    match args.json {
        true => emit_json(&report)?,
        false => emit_document(&text::text(&report))?,
    }
    Ok(if report.problems == 0 { Outcome::Done } else { Outcome::CheckFailed })
}

impl Report {
    fn make(limit: Duration) -> Self {
        let (plugins, python, hub) = std::thread::scope(|scope| {
            let python = spawn(scope, move || python::look(limit));
            let hub = spawn(scope, move || hub::checks(limit));
            (plugins::look(limit), python(), hub())
        });
        let needs_pip = plugins::needs_install(&plugins);
        let groups = [
            processor::checks(),
            threads::checks(),
            memory::checks(),
            plugins::checks(&plugins),
            python::checks(&python, needs_pip),
            disk::checks(),
            hub,
        ];
        let checks: Vec<Check> = groups.into_iter().flatten().collect();
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        Self {
            format: "grpo-doctor/1",
            version: env!("CARGO_PKG_VERSION"),
            system: format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
            problems: count(Status::Problem),
            notes: count(Status::Note),
            checks,
        }
    }
}

/// Runs `work` on a thread of its own, and returns a function that waits for its result. If the system starts no thread, the function runs
/// `work` itself.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl Fn() -> T + Copy + Send + 'scope,
) -> impl FnOnce() -> T {
    let thread = Builder::new().spawn_scoped(scope, work);
    // A panic of a check is one of this command.
    move || thread.map_or_else(|_| work(), |thread| thread.join().expect("no panic"))
}
