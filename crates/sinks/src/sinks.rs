//! TensorBoard and Weights & Biases sinks for runs and benchmarks.
//!
//! metrics.jsonl is authoritative. A sink that fails during the run is closed with a warning, and the run continues.

use crate::config::{LoggingConfig, WandbConfig};
use crate::error::{Error, Result};
use crate::wandb::{self, Mode};
use crate::{Sink, TensorBoard, Wandb};
use grpo_files::{redact, to_yaml};
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// The file with the id that all parts of a W&B run share.
const ID_FILE: &str = "wandb-id";

/// The enabled sinks of a configuration.
///
/// ```
/// use grpo_sinks::{About, LoggingConfig, Sinks, WandbConfig, wandb::Mode};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let config = std::collections::BTreeMap::from([("seed".to_owned(), 0)]);
/// let about = About { root: folder.path(), name: "first", config: &config };
/// let wandb = WandbConfig { mode: Some(Mode::Disabled), ..WandbConfig::default() };
/// let mut sinks = Sinks::open(&about, &LoggingConfig { tensorboard: true }, &wandb)?;
/// sinks.log("train", 1, &[("reward", 0.25)]);
/// sinks.finish(true, |note| println!("{note}"));
/// assert!(folder.path().join("tensorboard").is_dir());
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Sinks {
    open: Vec<(&'static str, Box<dyn Sink>)>,
    wandb: Option<WandbRun>,
    notes: Vec<String>,
}

struct WandbRun {
    dir: PathBuf,
    id: String,
    mode: Mode,
}

/// The run of the sinks.
pub struct About<'a, C> {
    /// The folder of the run.
    pub root: &'a Path,
    /// The name of the run, unless `wandb.name` sets another.
    pub name: &'a str,
    /// The configuration of the run.
    pub config: &'a C,
}

impl Sinks {
    /// Opens the sinks of a new or resumed run.
    ///
    /// # Errors
    /// [`Error::Mode`]; [`Error::Io`] and [`Error::Format`] if a sink cannot be opened.
    pub fn open<C: Serialize + DeserializeOwned>(
        about: &About<'_, C>,
        logging: &LoggingConfig,
        wandb: &WandbConfig,
    ) -> Result<Self> {
        let mut sinks = Self::default();
        if logging.tensorboard {
            let yaml = to_yaml(about.config).map_err(|e| Error::Unwritable(e.to_string()))?;
            let text = format!("```yaml\n{}```\n", yaml);
            let folder = about.root.join("tensorboard");
            sinks.open.push(("TensorBoard", Box::new(TensorBoard::open(&folder, &text)?)));
            sinks.notes.push(format!("watch with: tensorboard --logdir {}", folder.display()));
        }
        let mode = wandb.resolved_mode()?;
        if mode == Mode::Disabled {
            return Ok(sinks);
        }
        let section = wandb.clone();
        let options = wandb::Options {
            dir: section.dir.unwrap_or_else(|| about.root.to_owned()),
            id: wandb::run_id(&about.root.join(ID_FILE))?,
            project: section.project,
            entity: section.entity,
            name: Some(section.name.unwrap_or_else(|| about.name.to_owned())),
            group: section.group,
            tags: section.tags,
        };
        let json = |e: serde_json::Error| Error::Unwritable(e.to_string());
        let mut config = serde_json::to_value(about.config).map_err(json)?;
        redact(&mut config);
        let config: serde_json::Map<_, _> = serde_json::from_value(config).map_err(json)?;
        let run = Wandb::open(&options, &config)?;
        sinks.notes.push(format!("Weights & Biases: {}", run.folder().display()));
        sinks.open.push(("Weights & Biases", Box::new(run)));
        if let (Mode::Online, Some(obstacle)) = (mode, wandb::obstacle()) {
            tracing::warn!(
                "the run cannot be uploaded to Weights & Biases when it ends: {obstacle}; it will be kept here"
            );
        }
        sinks.wandb = Some(WandbRun { dir: options.dir, id: options.id, mode });
        Ok(sinks)
    }

    /// Returns lines for the user about the locations of the files.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.notes.iter().map(String::as_str)
    }

    /// Adds a row of `series` to every sink.
    pub fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) {
        self.each(|sink| sink.log(series, step, values));
    }

    /// Flushes logged rows to disk.
    pub fn flush(&mut self) {
        self.each(|sink| sink.flush());
    }

    /// Closes the sinks and uploads in mode `online`; `note` is called with a line about each.
    pub fn finish(mut self, succeeded: bool, mut note: impl FnMut(&str)) {
        self.each(|sink| sink.finish(i32::from(!succeeded)));
        let Some(WandbRun { dir, id, mode }) = self.wandb else { return };
        let ended = match mode {
            Mode::Online => {
                note("uploading to Weights & Biases ...");
                wandb::upload(&dir, &id).map(|()| "uploaded to Weights & Biases".to_owned())
            }
            _ => wandb::sync_command(&dir, &id).map(|command| format!("upload with: {command}")),
        };
        match ended {
            Ok(text) => note(&text),
            Err(e) => tracing::warn!("{e}"),
        }
    }

    /// Calls `work` with every sink, and removes sinks that fail.
    fn each(&mut self, mut work: impl FnMut(&mut dyn Sink) -> crate::Result<()>) {
        self.open.retain_mut(|(name, sink)| match work(sink.as_mut()) {
            Ok(()) => true,
            Err(e) => {
                tracing::warn!("{name} receives no more metrics of this run: {e}; metrics.jsonl is still written");
                false
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Records its calls and fails at a step.
    struct Recorder(Arc<Mutex<Vec<String>>>, u64);

    impl Sink for Recorder {
        fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> crate::Result<()> {
            if step == self.1 {
                return Err(crate::Error::Mode("broken".into()));
            }
            self.0.lock().unwrap().push(format!("{series} {step} {values:?}"));
            Ok(())
        }
        fn flush(&mut self) -> crate::Result<()> {
            self.0.lock().unwrap().push("flush".into());
            Ok(())
        }
        fn finish(&mut self, exit_code: i32) -> crate::Result<()> {
            self.0.lock().unwrap().push(format!("exit {exit_code}"));
            Ok(())
        }
    }

    #[test]
    fn failing_sink_is_closed_and_the_others_continue() {
        let (broken, whole) = (Arc::default(), Arc::default());
        let recorder = |heard: &Arc<_>, step| -> Box<dyn Sink> { Box::new(Recorder(Arc::clone(heard), step)) };
        let open = vec![("broken", recorder(&broken, 2)), ("whole", recorder(&whole, 0))];
        let mut sinks = Sinks { open, ..Sinks::default() };
        for (series, step, value) in
            [("warmup", 1, ("loss", 2.0)), ("train", 2, ("kl", f64::NAN)), ("eval", 3, ("pass@1", 0.5))]
        {
            sinks.log(series, step, &[value]);
        }
        sinks.flush();
        sinks.finish(false, |_| {});
        assert_eq!(*broken.lock().unwrap(), ["warmup 1 [(\"loss\", 2.0)]"]);
        let expected =
            ["warmup 1 [(\"loss\", 2.0)]", "train 2 [(\"kl\", NaN)]", "eval 3 [(\"pass@1\", 0.5)]", "flush", "exit 1"];
        assert_eq!(*whole.lock().unwrap(), expected);
    }
}
