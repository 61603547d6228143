//! Checks that the logs of a run match a checkpoint before they are truncated to it.

use super::checkpoint::{CheckpointId, SavedState};
use super::dir::RunDir;
use super::jsonl::{CompletionRow, MetricsRow, RowKind};
use crate::error::{Error, Result};
use grpo_files::{JsonLines, counted, each_row};
use grpo_trainer::Counters;
use std::path::Path;

/// Checks both logs up to the lengths in the checkpoint: they must end at a line's end, every row must parse, and the rows must lead to
/// the checkpoint's counters. Changes nothing.
///
/// # Errors
/// [`Error::RunDir`] with the number of the line; [`Error::File`].
pub(super) fn check(dir: &RunDir, saved: &SavedState, position: CheckpointId) -> Result<()> {
    JsonLines::check(&dir.metrics_path(), saved.metrics_bytes)?;
    JsonLines::check(&dir.completions_path(), saved.completions_bytes)?;
    let hint = |error| with_hint(error, position);
    check_metrics(&dir.metrics_path(), saved.metrics_bytes, saved.counters, position).map_err(hint)?;
    check_completions(&dir.completions_path(), saved.completions_bytes, saved.counters).map_err(hint)
}

fn with_hint(error: Error, position: CheckpointId) -> Error {
    match error {
        Error::File(grpo_files::Error::Rows { path, reason }) | Error::RunDir { path, reason } => {
            let reason = format!(
                "{reason}; it is not the file that {position} was taken with, so nothing was changed: restore the file, or \
                 continue from another checkpoint with `--from`"
            );
            Error::RunDir { path, reason }
        }
        other => other,
    }
}

fn check_metrics(path: &Path, bytes: u64, counters: Counters, position: CheckpointId) -> Result<()> {
    let (mut warmup, mut grpo, mut evaluated, mut tokens) = (0u64, 0u64, None, 0.0);
    each_row(path, bytes, |row: MetricsRow| {
        let (last, phase) = match row.phase {
            RowKind::Warmup if grpo > 0 || evaluated.is_some() => {
                return Err(format!("step {} of the warm-up comes after the warm-up", row.step));
            }
            RowKind::Warmup => (&mut warmup, "the warm-up"),
            RowKind::Grpo => (&mut grpo, "GRPO"),
            RowKind::Eval if row.step != grpo || evaluated == Some(grpo) => {
                return Err(format!("an evaluation at step {} comes after step {grpo} of GRPO", row.step));
            }
            RowKind::Eval => {
                evaluated = Some(row.step);
                return Ok(());
            }
        };
        if row.step != *last + 1 {
            return Err(format!("step {} of {phase} comes after step {last}", row.step));
        }
        *last = row.step;
        if row.phase == RowKind::Grpo {
            tokens = row.get("num_tokens").unwrap_or(f64::NAN);
        }
        Ok(())
    })?;
    let begun = matches!(position, CheckpointId::Grpo(_));
    // A run without held-out data has no evaluation.
    let expected =
        (counters.warmup_steps, counters.grpo_steps, begun && evaluated.is_some(), counters.num_tokens as f64);
    let found = (warmup, grpo, evaluated.is_some(), tokens);
    if found == expected {
        return Ok(());
    }
    let tell = |(warmup, grpo, evaluated, tokens)| {
        let and = if evaluated { "evaluations" } else { "no evaluation" };
        let (warmup, grpo) = (counted(warmup, "warm-up step"), counted(grpo, "GRPO step"));
        format!("{warmup}, {grpo} with {tokens} tokens, and {and}")
    };
    let reason = format!("its rows up to the checkpoint are of {}, expected {}", tell(found), tell(expected));
    Err(Error::RunDir { path: path.to_owned(), reason })
}

fn check_completions(path: &Path, bytes: u64, counters: Counters) -> Result<()> {
    let mut last = 1;
    let read = each_row(path, bytes, |row: CompletionRow| {
        if row.step < last || row.step > counters.grpo_steps {
            let to = counters.grpo_steps;
            return Err(format!("a completion of step {} where one of step {last} to {to} is expected", row.step));
        }
        last = row.step;
        Ok(())
    });
    Ok(read?)
}
