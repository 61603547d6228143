//! `grpo bench-worker`: what `grpo bench` starts for each variant.

use crate::Outcome;
use grpo_bench::worker::serve;

pub(crate) fn run() -> anyhow::Result<Outcome> {
    // Libraries that print must not print into the replies; nothing in here does.
    serve(std::io::stdin().lock(), std::io::stdout().lock())?;
    Ok(Outcome::Done)
}
