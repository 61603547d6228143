//! `grpo bench-worker`: the process that `grpo bench` starts for each variant.

use crate::output::Outcome;
use grpo_bench::worker::serve;

pub(crate) fn run() -> anyhow::Result<Outcome> {
    // Libraries that print would corrupt the replies on standard output; nothing in this crate prints.
    serve(std::io::stdin().lock(), std::io::stdout().lock())?;
    Ok(Outcome::Done)
}
