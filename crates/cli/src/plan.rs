//! `grpo plan`: meshes, micro-batches and recomputation of a run, or the largest tile of a loss, for devices that need not be present.

use crate::compiling::Compiling;
use crate::output::Outcome;
use crate::plan_args::Args;
use crate::{aot_run, plan_loss, plan_run};
use anyhow::bail;

pub(crate) fn run(args: Args, compiling: &Compiling) -> anyhow::Result<Outcome> {
    if aot_run::is_run(&args.bench)? {
        if args.variant.is_some() {
            bail!("--variant: expected the configuration of a benchmark (configs/bench/), got that of a run");
        }
        return plan_run::run(args, compiling);
    }
    for (option, is_given) in [("--compile", args.compile.is_some()), ("--top", args.top.is_some())] {
        if is_given {
            bail!(
                "{option}: expected the configuration of a run (configs/train/, configs/aot/), got that of a benchmark"
            );
        }
    }
    plan_loss::run(&args)
}
