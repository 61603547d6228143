//! The subcommand `grpo export`.

use crate::output::{Outcome, emit};
use crate::start_folder;
use anyhow::Context;
use grpo_run::Run;
use std::path::PathBuf;

/// Arguments of `grpo export`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A finished run of a pretrained model writes RUN/model by itself. This command exports a stopped run, an earlier checkpoint, \
    or another format: `--set export.merge_adapters=true` merges LoRA adapters into the weights, `--set \
    export.dtype=bfloat16` halves the files. The run itself is not changed."
)]
pub(crate) struct Args {
    /// The folder of the run.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// The checkpoint, e.g. `step-000100`. [default: the newest, or the best of a run that ended with run.load_best_model_at_end]
    #[arg(long, value_name = "CHECKPOINT")]
    from: Option<String>,
    /// Where to write the folder, which must not exist yet. [default: RUN/model, which is replaced]
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Set one key of the section `export`; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    set: Vec<String>,
}

/// Reads the checkpoint, writes the folder.
pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let target = args.to.as_ref().map(std::path::absolute).transpose().context("--to")?;
    let run = start_folder::enter(&args.run)?;
    let folder = Run::export(&run, args.from.as_deref(), &args.set, target.as_deref())?;
    let folder = folder.display();
    emit(&format!("wrote {folder}\n")).with_context(|| format!("the folder {folder} is complete"))?;
    Ok(Outcome::Done)
}
