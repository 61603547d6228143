//! TensorBoard event files.

mod event;
mod tfrecord;

use crate::error::Result;
use crate::files::{Appender, entries, host, name};
use crate::steps::Steps;
use crate::{Error, Sink};
use event::{Event, PluginData, Summary, SummaryMetadata, Tensor, TensorShape, Value, What};
use prost::Message;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The part of a file name by which TensorBoard recognises event files.
const MARK: &str = "tfevents";

/// A sink that writes scalars to an event file, as f32; values that are not finite are kept.
#[derive(Debug)]
pub struct TensorBoard {
    file: Appender,
    steps: Steps,
}

impl TensorBoard {
    /// Creates an event file in `folder`, which is created if missing. Other event files there are earlier parts of the same run.
    /// `config` is Markdown that TensorBoard displays on its text page.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(folder: &Path, config: &str) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let mut steps = Steps::default();
        for path in event_files(folder)? {
            let bytes = grpo_files::read_regular(&path, u64::MAX).map_err(Error::io("read", &path))?;
            tfrecord::records(&bytes).filter_map(|r| Event::decode(r).ok()).for_each(|event| note(&event, &mut steps));
        }
        let mut sink = Self { file: create(folder)?, steps };
        let config = Event::summary(now(), 0, vec![text("config/text_summary", config)]);
        sink.append(&[Event::file_version(now()), config])?;
        Ok(sink)
    }

    /// Returns the path of the event file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    fn append(&mut self, events: &[Event]) -> Result<()> {
        let mut bytes = Vec::new();
        events.iter().for_each(|event| tfrecord::append(&event.encode_to_vec(), &mut bytes));
        self.file.append(&bytes)
    }
}

impl Sink for TensorBoard {
    fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> Result<()> {
        if !self.steps.lacks(series, step) {
            return Ok(());
        }
        let scalar = |&(name, value): &(&str, f64)| Value::scalar(format!("{series}/{name}"), value as f32);
        self.append(&[Event::summary(now(), step as i64, values.iter().map(scalar).collect())])?;
        self.steps.add(series, step);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.file.sync()
    }

    fn finish(&mut self, _exit_code: i32) -> Result<()> {
        self.file.sync()
    }
}

fn event_files(folder: &Path) -> Result<Vec<PathBuf>> {
    Ok(entries(folder)?.into_iter().filter(|path| name(path).contains(MARK)).collect())
}

/// Creates the file of a part. TensorBoard reads files in the order of their names, so a later part has a later second.
fn create(folder: &Path) -> Result<Appender> {
    let second = |path: &PathBuf| name(path).split('.').find_map(|part| part.parse::<u64>().ok());
    let last = event_files(folder)?.iter().filter_map(second).max().unwrap_or(0);
    let second = (now() as u64).max(last + 1);
    let file = format!("events.out.{MARK}.{second:010}.{}.{}.0", host(), std::process::id());
    Appender::create(folder.join(file))
}

/// Creates a text in the format of the plugin `text`: one string in a tensor of shape `[1]`.
fn text(tag: &str, markdown: &str) -> Value {
    let plugin = PluginData { plugin_name: "text".into() };
    let tensor = Tensor {
        dtype: event::DT_STRING,
        shape: Some(TensorShape { dim: vec![event::Dim { size: 1 }] }),
        string_val: vec![markdown.as_bytes().to_vec()],
    };
    let metadata = Some(SummaryMetadata { plugin_data: Some(plugin) });
    Value { tag: tag.into(), metadata, tensor: Some(tensor), simple_value: None }
}

fn note(event: &Event, steps: &mut Steps) {
    let Some(What::Summary(Summary { value })) = &event.what else { return };
    for value in value.iter().filter(|value| value.simple_value.is_some()) {
        if let (Some((series, _)), Ok(step)) = (value.tag.split_once('/'), u64::try_from(event.step)) {
            steps.add(series, step);
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars(path: &Path) -> Vec<(String, i64, f32)> {
        let bytes = std::fs::read(path).unwrap();
        let events = tfrecord::records(&bytes).map(|r| Event::decode(r).unwrap());
        events
            .flat_map(|event| match event.what {
                Some(What::Summary(summary)) => {
                    summary.value.into_iter().filter_map(|v| Some((v.tag, event.step, v.simple_value?))).collect()
                }
                _ => Vec::new(),
            })
            .collect()
    }

    #[test]
    fn resumed_tensorboard_run_writes_a_later_file_and_no_step_twice() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = TensorBoard::open(folder.path(), "").unwrap();
        for step in 1..=3 {
            first.log("train", step, &[("loss", step as f64)]).unwrap();
        }
        // The process was killed within a record.
        first.append(&[Event::summary(0.0, 4, vec![Value::scalar("train/loss".into(), 4.0)])]).unwrap();
        let bytes = std::fs::read(first.path()).unwrap();
        std::fs::write(first.path(), &bytes[..bytes.len() - 3]).unwrap();

        let mut second = TensorBoard::open(folder.path(), "").unwrap();
        assert!(second.path() > first.path());
        second.log("eval", 0, &[("pass@1", 0.5)]).unwrap();
        for step in 2..=5 {
            second.log("train", step, &[("loss", step as f64)]).unwrap();
        }
        let expected = [("eval/pass@1", 0, 0.5), ("train/loss", 4, 4.0), ("train/loss", 5, 5.0)];
        assert_eq!(scalars(second.path()), expected.map(|(tag, step, value)| (tag.to_owned(), step, value)));
        assert_eq!(scalars(first.path()).len(), 3);
    }

    #[test]
    fn tensorboard_error_names_the_folder_that_cannot_be_created() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = TensorBoard::open(&file.path().join("logs"), "").unwrap_err().to_string();
        assert!(error.contains("cannot create") && error.contains("logs"), "{error}");
    }
}
