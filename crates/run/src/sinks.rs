//! Passes the events of a run to its sinks.

use super::jsonl::{MetricsRow, RowKind};
use super::observer::{Event, Observer};
use crate::error::Result;
use grpo_files::make_folder;
use grpo_run_config::{TrainConfig, WandbConfig, WandbMode};
use grpo_sinks::{About, Sinks};
use std::path::Path;

/// Opens the sinks of the run in `root`, new or continued.
pub(super) fn open(root: &Path, config: &TrainConfig) -> Result<Sinks> {
    Ok(Sinks::open(&About { root, name: &config.run.name, config }, &config.logging, &config.wandb)?)
}

/// Checks, before a run is created, that `wandb.dir` is writable if it is outside the run folder.
pub(super) fn check(wandb: &WandbConfig) -> Result<()> {
    match (&wandb.dir, wandb.resolved_mode()?) {
        (None, _) | (_, WandbMode::Disabled) => Ok(()),
        (Some(folder), _) => Ok(make_folder(&folder.join("wandb"))?),
    }
}

/// Returns the name of a series of rows, as in the integrations of transformers.
fn series(kind: RowKind) -> &'static str {
    match kind {
        RowKind::Warmup => "warmup",
        RowKind::Grpo => "train",
        RowKind::Eval => "eval",
    }
}

impl Observer for Sinks {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Row(MetricsRow { phase, step, values, .. }) => {
                let values = values.iter().map(|(name, value)| {
                    // Evaluation metrics already have the prefix.
                    (name.strip_prefix("eval/").unwrap_or(name), value.unwrap_or(f64::NAN))
                });
                self.log(series(*phase), *step, &values.collect::<Vec<_>>());
            }
            Event::Saved(_) => self.flush(),
            _ => {}
        }
    }
}
