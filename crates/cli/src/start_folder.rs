//! Runs that go on from another folder than the one in which they were begun.

use anyhow::Context;
use std::path::{Path, PathBuf};

/// Goes to the folder in which the run in `run` was begun, so that the relative paths of its configuration (model, data, programs that
/// reward) lead where they did. Returns the path of the run, which is absolute where the folder has changed.
pub(crate) fn enter(run: &Path) -> anyhow::Result<PathBuf> {
    let here = std::env::current_dir().context("the present folder cannot be found")?;
    let Some(start) = trainer::run::start_folder(run)?.filter(|start| *start != here) else {
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
