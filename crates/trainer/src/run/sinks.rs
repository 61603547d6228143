//! TensorBoard and Weights & Biases as observers of a run.
//!
//! metrics.jsonl stays the truth. A sink that fails in mid-run is given up with a warning; the run goes on.

use super::jsonl::{MetricsRow, RowKind};
use super::observer::{Event, Observer};
use crate::config_layers::to_yaml;
use crate::error::{Error, Result};
use crate::train_config::TrainConfig;
use grpo_sinks::wandb::{self, Mode};
use grpo_sinks::{Sink, TensorBoard, Wandb};
use std::path::{Path, PathBuf};

/// Holds the id that all parts of a W&B run share.
const ID_FILE: &str = "wandb-id";

/// The sinks that a configuration asks for.
#[derive(Default)]
pub(super) struct Sinks {
    open: Vec<(&'static str, Box<dyn Sink>)>,
    wandb: Option<WandbRun>,
    notes: Vec<String>,
}

/// A run of W&B and what becomes of it at the end.
struct WandbRun {
    dir: PathBuf,
    id: String,
    mode: Mode,
}

impl Sinks {
    /// Begins or continues the sinks of the run in `root`.
    pub(super) fn open(root: &Path, config: &TrainConfig) -> Result<Self> {
        let mut sinks = Self::default();
        if config.logging.tensorboard {
            let text = format!("```yaml\n{}```\n", to_yaml(config)?);
            let folder = root.join("tensorboard");
            sinks.open.push(("TensorBoard", Box::new(TensorBoard::open(&folder, &text)?)));
            sinks.notes.push(format!("watch with: tensorboard --logdir {}", folder.display()));
        }
        let mode = config.wandb.resolved_mode()?;
        if mode != Mode::Disabled {
            sinks.open_wandb(root, config, mode)?;
        }
        Ok(sinks)
    }

    fn open_wandb(&mut self, root: &Path, config: &TrainConfig, mode: Mode) -> Result<()> {
        let section = config.wandb.clone();
        let options = wandb::Options {
            dir: section.dir.unwrap_or_else(|| root.to_owned()),
            id: wandb::run_id(&root.join(ID_FILE))?,
            project: section.project,
            entity: section.entity,
            name: Some(section.name.unwrap_or_else(|| config.run.name.clone())),
            group: section.group,
            tags: section.tags,
        };
        let json = |e| Error::Text(format!("configuration: {e}"));
        let config: serde_json::Map<_, _> =
            serde_json::to_value(config).and_then(serde_json::from_value).map_err(json)?;
        let run = Wandb::open(&options, &config)?;
        self.notes.push(format!("Weights & Biases: {}", run.folder().display()));
        self.open.push(("Weights & Biases", Box::new(run)));
        if let (Mode::Online, Some(obstacle)) = (mode, wandb::obstacle()) {
            tracing::warn!(
                "the run cannot be uploaded to Weights & Biases when it ends: {obstacle}; it will be kept here"
            );
        }
        self.wandb = Some(WandbRun { dir: options.dir, id: options.id, mode });
        Ok(())
    }

    /// Says where the sinks are.
    pub(super) fn announce(&self, observer: &mut dyn Observer) {
        self.notes.iter().for_each(|note| observer.event(Event::Note(note)));
    }

    /// Ends the sinks, and uploads what is to be uploaded.
    pub(super) fn finish(mut self, succeeded: bool, observer: &mut dyn Observer) {
        self.each(|sink| sink.finish(i32::from(!succeeded)));
        let Some(WandbRun { dir, id, mode }) = self.wandb else { return };
        let ended = match mode {
            Mode::Online => {
                observer.event(Event::Note("uploading to Weights & Biases ..."));
                wandb::upload(&dir, &id).map(|()| "uploaded to Weights & Biases".to_owned())
            }
            _ => wandb::sync_command(&dir, &id).map(|command| format!("upload with: {command}")),
        };
        match ended {
            Ok(note) => observer.event(Event::Note(&note)),
            Err(e) => tracing::warn!("{e}"),
        }
    }

    fn log(&mut self, row: &MetricsRow) {
        let series = series(row.phase);
        let values = row.values.iter().map(|(name, value)| {
            // The names of an evaluation say already that they are of one.
            (name.strip_prefix("eval/").unwrap_or(name), value.unwrap_or(f64::NAN))
        });
        let values: Vec<_> = values.collect();
        self.each(|sink| sink.log(series, row.step, &values));
    }

    /// Does something with every sink, and gives up those that fail.
    fn each(&mut self, mut work: impl FnMut(&mut dyn Sink) -> grpo_sinks::Result<()>) {
        self.open.retain_mut(|(name, sink)| match work(sink.as_mut()) {
            Ok(()) => true,
            Err(e) => {
                tracing::warn!("{name} gets no more metrics of this run: {e}; metrics.jsonl goes on");
                false
            }
        });
    }
}

/// What the rows of a kind are called, as the Transformers' integrations call theirs.
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
            Event::Row(row) => self.log(row),
            Event::Saved(_) => self.each(|sink| sink.flush()),
            _ => {}
        }
    }
}

/// Sinks and the caller's observer.
pub(super) struct With<'a>(pub(super) &'a mut Sinks, pub(super) &'a mut dyn Observer);

impl Observer for With<'_> {
    fn event(&mut self, event: Event<'_>) {
        self.0.event(event);
        self.1.event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Writes down what it hears and fails at a step.
    struct Recorder(Arc<Mutex<Vec<String>>>, u64);

    impl Sink for Recorder {
        fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> grpo_sinks::Result<()> {
            if step == self.1 {
                return Err(grpo_sinks::Error::Mode("broken".into()));
            }
            self.0.lock().unwrap().push(format!("{series} {step} {values:?}"));
            Ok(())
        }
        fn flush(&mut self) -> grpo_sinks::Result<()> {
            self.0.lock().unwrap().push("flush".into());
            Ok(())
        }
        fn finish(&mut self, exit_code: i32) -> grpo_sinks::Result<()> {
            self.0.lock().unwrap().push(format!("exit {exit_code}"));
            Ok(())
        }
    }

    #[test]
    fn a_sink_that_fails_is_given_up_and_the_others_go_on() {
        let (broken, whole) = (Arc::default(), Arc::default());
        let recorder = |heard: &Arc<_>, step| -> Box<dyn Sink> { Box::new(Recorder(Arc::clone(heard), step)) };
        let open = vec![("broken", recorder(&broken, 2)), ("whole", recorder(&whole, 0))];
        let mut sinks = Sinks { open, ..Sinks::default() };
        for row in [
            MetricsRow::new(RowKind::Warmup, 1, [("loss", 2.0)]),
            MetricsRow::new(RowKind::Grpo, 2, [("kl", f64::INFINITY)]),
            MetricsRow::new(RowKind::Eval, 3, [("eval/pass@1", 0.5)]),
        ] {
            sinks.event(Event::Row(&row));
        }
        sinks.event(Event::Saved(Path::new("checkpoint")));
        sinks.finish(false, &mut ());
        assert_eq!(*broken.lock().unwrap(), ["warmup 1 [(\"loss\", 2.0)]"]);
        let expected =
            ["warmup 1 [(\"loss\", 2.0)]", "train 2 [(\"kl\", NaN)]", "eval 3 [(\"pass@1\", 0.5)]", "flush", "exit 1"];
        assert_eq!(*whole.lock().unwrap(), expected);
    }
}
