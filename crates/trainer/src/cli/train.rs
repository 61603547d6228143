//! `grpo train`.

use super::Outcome;
use std::path::PathBuf;

/// Arguments of `grpo train`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    layers: LayerArgs,
    /// Print the resolved configuration as YAML and exit.
    #[arg(long)]
    print_config: bool,
    /// Continue the run in this folder, exactly as if it had not stopped.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "set", "run_dir"])]
    resume: Option<PathBuf>,
    /// The checkpoint to resume from instead of the newest, e.g. `step-000100`.
    #[arg(long, value_name = "CHECKPOINT", requires = "resume")]
    from: Option<String>,
    /// Folder for this run; must not hold a run yet. [default: runs/<run.name>-<number>]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print nothing but errors.
    #[arg(long, short)]
    quiet: bool,
}

/// Where a configuration comes from; every subcommand that reads one has these.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    /// YAML or JSON file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One key, after the file and the environment (`GRPO__A__B=value`); repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Trains, resumes, or prints the configuration.
pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    anyhow::bail!("not wired up yet: {args:?}")
}
