//! Resuming runs from another working folder.

use anyhow::Context;
use std::path::{Path, PathBuf};

/// Changes to the working folder in which the run in `run` was started, so that relative paths of its configuration (model, data, reward
/// programs) stay valid. Returns the path of the run, which is absolute if the folder has changed.
pub(crate) fn enter(run: &Path) -> anyhow::Result<PathBuf> {
    let current = std::env::current_dir().context("the present folder cannot be found")?;
    let Some(start) = grpo_run::start_folder(run)?.filter(|start| *start != current) else {
        return Ok(run.to_owned());
    };
    let run = std::path::absolute(run).with_context(|| format!("cannot find {}", run.display()))?;
    match std::env::set_current_dir(&start) {
        Ok(()) => tracing::info!("relative paths of the run go from {}, where it was begun", start.display()),
        Err(error) => tracing::warn!(
            "relative paths of the run go from here: the folder in which it was begun, {}, cannot be entered ({error})",
            start.display()
        ),
    }
    Ok(run)
}
