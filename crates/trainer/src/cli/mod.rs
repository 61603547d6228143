//! Command line: arguments in, calls of the library, text out.
//!
//! A subcommand is a file with `Args` (what clap parses) and `run(Args) -> anyhow::Result<Outcome>`. Standard output
//! carries results, standard error carries logs and errors.

mod aot;
mod aot_text;
mod bench;
mod bench_layers;
mod bench_text;
mod bench_worker;
mod display;
mod gradcheck;
mod layers;
mod loss;
mod loss_input;
mod parity;
mod plan;
mod plugin;
mod progress;
mod table;
mod terminal;
mod threads;
mod train;

use anyhow::Context;
use clap::{Parser, Subcommand};
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// GRPO: train, and check the loss.
#[derive(Debug, Parser)]
#[command(name = "grpo", version, about, propagate_version = true, max_term_width = 110)]
#[command(after_help = "Exit codes: 0 done, 1 a check failed, 2 bad usage or bad input.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a small model on verifiable tasks, end to end.
    Train(train::Args),
    /// Check implementations of the loss on batch files: against the file's expected.* and the f64 oracle.
    Parity(parity::Args),
    /// Check gradients on a benchmark's problems, reduced: the oracle's against differences, every variant against the oracle.
    Gradcheck(gradcheck::Args),
    /// Evaluate the loss of a batch file; write loss, log-probabilities, entropies and gradients.
    Loss(loss::Args),
    /// Compile the loss for a TPU or GPU that is not here; report memory, and the compiler's estimate of the time.
    Aot(aot::Args),
    /// Measure the loss on this CPU or on devices that are here, against floors measured in the same run.
    Bench(bench::Args),
    /// Serve `grpo bench`.
    #[command(hide = true)]
    BenchWorker,
    /// Find the largest chunk of tokens with which the loss fits into a device's memory, by asking its compiler.
    Plan(plan::Args),
    /// Install and list PJRT plugins: the compilers and runtimes of TPUs, GPUs and XLA's CPU.
    Plugin(plugin::Args),
}

/// How a command that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// What was asked for is done.
    Done,
    /// The command worked, and what it checked does not hold.
    CheckFailed,
}

/// Parses the arguments, runs the command, maps its result to an exit code.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    // Logs are for people who ask for them: `GRPO_LOG=info grpo ...`.
    let filter = tracing_subscriber::EnvFilter::try_from_env("GRPO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // A file or a pipe gets no colours, nor who does not want them (https://no-color.org).
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    logs.with_ansi(colours).without_time().init();
    // What started a worker has said it already.
    threads::hold_to_machine(matches!(cli.command, Command::BenchWorker));
    let result = match cli.command {
        Command::Train(args) => train::run(args),
        Command::Parity(args) => parity::run(args),
        Command::Gradcheck(args) => gradcheck::run(args),
        Command::Loss(args) => loss::run(args),
        Command::Aot(args) => aot::run(args),
        Command::Bench(args) => bench::run(args),
        Command::BenchWorker => bench_worker::run(),
        Command::Plan(args) => plan::run(args),
        Command::Plugin(args) => plugin::run(args),
    };
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::CheckFailed) => ExitCode::from(1),
        Err(error) => {
            // One line with its causes; `{:#}` joins them with colons.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Writes `text` to standard output; a reader that has gone away (`| head`) is no error.
///
/// # Errors
/// When standard output cannot be written for another reason.
pub(crate) fn emit(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A flag that the first SIGINT or SIGTERM sets, `saying` what it will lead to; the second one ends the process.
fn stop_on_signal(saying: &'static str) -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            // 128 + SIGINT, as shells count. Checkpoints are atomic, so nothing is lost but the present step.
            std::process::exit(130);
        }
        let _ = writeln!(std::io::stderr(), "\n{saying}; once more to quit at once");
    })
    .context("cannot handle Ctrl-C")?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
