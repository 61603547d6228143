//! Stops at signals.

use anyhow::Context;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns a flag that the first SIGINT or SIGTERM sets, printing `saying`; the second one ends the process. Until `has_begun` is set, the first
/// one ends the process, because there is nothing to save yet.
pub(crate) fn stop_on_signal(saying: &'static str, has_begun: &Arc<AtomicBool>) -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let (flag, has_begun) = (Arc::clone(&stop), Arc::clone(has_begun));
    ctrlc::set_handler(move || {
        if !has_begun.load(Ordering::Relaxed) || flag.swap(true, Ordering::Relaxed) {
            // 130 is 128 + SIGINT, as in shells. Checkpoints are atomic, so only the current step is lost.
            grpo_rewards::kill_programs();
            std::process::exit(130);
        }
        let _ = writeln!(std::io::stderr(), "\n{saying}; once more to quit at once");
    })
    .context("cannot handle Ctrl-C")?;
    Ok(stop)
}
