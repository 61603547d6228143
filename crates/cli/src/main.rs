#![doc = include_str!("../README.md")]
//! # The code
//!
//! `main` parses arguments, calls the libraries, and prints text.
//!
//! Each subcommand is a file with `Args` (parsed by clap) and `run(Args) -> anyhow::Result<Outcome>`. Results go to standard output,
//! logs and errors to standard error.
#![forbid(unsafe_code)]

mod aot;
mod aot_run;
mod aot_run_text;
mod aot_text;
mod aot_worker;
mod bench;
mod bench_layers;
mod bench_model;
mod bench_text;
mod bench_worker;
mod child;
mod commented;
mod compiling;
mod completions;
mod data;
mod data_text;
mod display;
mod doctor;
mod estimates;
mod export;
mod gradcheck;
mod init;
mod layers;
mod logs;
mod loss;
mod loss_input;
mod output;
mod overview;
mod parity;
mod parity_model;
mod plan;
mod plan_args;
mod plan_loss;
mod plan_run;
mod plan_run_text;
mod plugin;
mod progress;
mod report;
mod signals;
mod start_folder;
mod table;
mod terminal;
mod threads;
mod train;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use compiling::Compiling;
use grpo_files::printable_line;
use output::Outcome;
use std::io::Write;
use std::process::ExitCode;

/// GRPO: train, and check the loss.
#[derive(Debug, Parser)]
#[command(name = "grpo", version, about, propagate_version = true, max_term_width = 110)]
#[command(
    after_help = "Exit codes: 0 done, 1 a check failed, 2 bad usage, bad input or a run that failed, 3 stopped by \
    SIGINT or SIGTERM with everything saved, 130 ended at once by a second signal."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model folder, or a new small model, with GRPO, end to end.
    Train(train::Args),
    /// Write a commented configuration of a run for a model and data files.
    Init(init::Args),
    /// Show the prompts of data files: tokens, lengths, dropped rows, rewards of the reference answers.
    Data(data::Args),
    /// Write a checkpoint of a run as a folder for transformers or PEFT.
    Export(export::Args),
    /// Make one HTML page of runs: curves, evaluations, samples, differences of configuration.
    Report(report::Args),
    /// Check implementations of the loss against a batch file's expected.* and the f64 oracle.
    Parity(parity::Args),
    /// Check the gradients of every variant against the f64 oracle, and the oracle against differences.
    Gradcheck(gradcheck::Args),
    /// Evaluate the loss of a batch file; write loss, log-probabilities, entropies and gradients.
    Loss(loss::Args),
    /// Compile the loss, or a run's programs, for an absent TPU or GPU; report memory and estimated time.
    Aot(aot_worker::Args),
    /// Check processor, memory, plugins, caches, Python and the Hub; say what to do about problems.
    Doctor(doctor::Args),
    /// Measure the loss on this CPU or on attached devices, against floors measured in the same run.
    Bench(bench::Args),
    /// Serve `grpo bench`.
    #[command(hide = true)]
    BenchWorker,
    /// Choose mesh, micro-batch and recomputation of a run, or the chunk of a loss, for a TPU or GPU.
    Plan(plan_args::Args),
    /// Install and list PJRT plugins: the compilers and runtimes of TPUs, GPUs and XLA's CPU.
    Plugin(plugin::Args),
}

/// The headings of `grpo --help` with their commands.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Train", &["init", "data", "train", "report", "export"]),
    ("Check the loss", &["parity", "loss", "gradcheck"]),
    ("Plan for devices", &["plan", "aot", "plugin"]),
    ("Measure", &["bench"]),
    ("Check the machine", &["doctor"]),
];

/// Returns the parser, whose help lists the commands in [`GROUPS`].
fn command_line() -> clap::Command {
    let command = Cli::command();
    let (header, literal) = (command.get_styles().get_header(), command.get_styles().get_literal());
    let mut template = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (heading, names) in GROUPS {
        template += &format!("\n{header}{heading}:{header:#}\n");
        for command in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            template += &format!("  {literal}{:<9}{literal:#}  {about}\n", command.get_name());
        }
    }
    template += &format!("\n{header}Options:{header:#}\n{{options}}{{after-help}}");
    command.help_template(template)
}

/// Parses the arguments, runs the command, maps its result to an exit code.
fn main() -> ExitCode {
    // Before the first thread starts; compilers in other processes inherit it.
    grpo_pjrt::quiet_logs();
    let cli = Cli::from_arg_matches(&command_line().get_matches()).unwrap_or_else(|error| error.exit());
    let compiling = Compiling::default();
    // Logs are shown on request: `GRPO_LOG=info grpo ...`.
    logs::init(compiling.clone());
    // The parent process of a worker has already warned.
    threads::hold_to_machine(matches!(cli.command, Command::BenchWorker));
    let result = match cli.command {
        Command::Train(args) => train::run(args, compiling),
        Command::Init(args) => init::run(args),
        Command::Data(args) => data::run(args),
        Command::Export(args) => export::run(args),
        Command::Report(args) => report::run(args),
        Command::Parity(args) => parity::run(args),
        Command::Gradcheck(args) => gradcheck::run(args),
        Command::Loss(args) => loss::run(args),
        Command::Aot(args) => aot::run(args, &compiling),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => bench::run(args),
        Command::BenchWorker => {
            compiling.silence();
            bench_worker::run()
        }
        Command::Plan(args) => plan::run(args, &compiling),
        Command::Plugin(args) => plugin::run(args),
    };
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::CheckFailed) => ExitCode::from(1),
        Ok(Outcome::Stopped) => ExitCode::from(3),
        Err(error) => {
            let text = grpo_run::failure::with_causes(error.as_ref());
            let _ = writeln!(std::io::stderr(), "error: {}", printable_line(&text));
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn help_lists_every_command_in_one_group_on_one_line() {
        let command = Cli::command();
        let mut visible: Vec<&str> =
            command.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        visible.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, visible);
        let help = command_line().render_help().to_string();
        for name in visible {
            let is_entry = |line: &&str| line.starts_with(&format!("  {name} ")) && line.chars().count() <= 110;
            assert_eq!(help.lines().filter(is_entry).count(), 1, "{name}: {help}");
        }
    }

    /// Collects the options of all subcommands, with their path.
    fn options(command: &clap::Command, path: &str, found: &mut Vec<(String, clap::Arg)>) {
        for argument in command.get_arguments().filter(|argument| argument.get_long().is_some()) {
            found.push((path.to_owned(), argument.clone()));
        }
        for command in command.get_subcommands() {
            options(command, &format!("{path} {}", command.get_name()), found);
        }
    }

    #[test]
    fn options_have_the_same_form_in_all_subcommands() {
        let mut found = vec![];
        options(&Cli::command(), "grpo", &mut found);
        let long = |argument: &clap::Arg| argument.get_long().unwrap_or_default().to_owned();
        for (place, argument) in &found {
            for (other_place, other) in found.iter().filter(|(_, other)| long(other) == long(argument)) {
                let form = |argument: &clap::Arg| {
                    let names = argument.get_value_names().map(|names| format!("{names:?}"));
                    let names = names.filter(|_| argument.get_action().takes_values());
                    let aliases = format!("{:?}", argument.get_all_aliases());
                    (names, argument.get_value_delimiter(), argument.get_short(), aliases)
                };
                // Worker processes get their arguments from their parent.
                if !(argument.is_hide_set() || other.is_hide_set()) {
                    let name = long(argument);
                    assert_eq!(form(argument), form(other), "--{name} of `{place}` and `{other_place}`");
                }
            }
        }
        // Lists of variants, output files and the plugin have the same option names everywhere.
        let taken: Vec<String> = found.iter().map(|(_, argument)| long(argument)).collect();
        assert!(!taken.iter().any(|name| name == "output"), "{taken:?}");
        for shared in ["variants", "out", "plugin"] {
            let places = taken.iter().filter(|name| *name == shared).count();
            assert!(places > 1, "--{shared} is compared with itself: {taken:?}");
        }
    }

    #[test]
    fn configurations_are_arguments_and_options_have_one_spelling() {
        for line in [
            "train a.yaml --set seed=1",
            "train --config a.yaml",
            "aot a.yaml --target v6e --variants a,b --variants c",
            "bench a.yaml b.yaml --variants a --out r.json",
            "bench --variants a,b -o r.json",
            "gradcheck a.yaml --variants a,b --print-config",
            "plan a.yaml --target v6e --variant fused",
            "plan a.yaml --target v6e --compile 2 --top 5 --json",
            "loss batch.safetensors --out r.safetensors",
            "plugin install cpu --force",
            "report runs/a runs/b -o r.html",
            "init --model a --data b.jsonl --data c.jsonl -o t.yaml --force",
        ] {
            let parsed = Cli::try_parse_from(["grpo"].into_iter().chain(line.split(' ')));
            assert!(parsed.is_ok(), "{line}: {parsed:?}");
        }
        for line in [
            "train a.yaml --config b.yaml",
            "train a.yaml --resume run",
            "train --config a.yaml --resume run",
            "aot --target v6e --variant a",
            "plan a.yaml --target v6e --variants fused",
            "plan a.yaml --target v6e --variant fused --top 5",
            "loss batch.safetensors --output r.safetensors",
        ] {
            let refused = Cli::try_parse_from(["grpo"].into_iter().chain(line.split(' ')));
            assert!(refused.is_err(), "{line}: {refused:?}");
        }
    }
}
