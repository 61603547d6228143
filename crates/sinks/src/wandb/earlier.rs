//! Content of the earlier parts of a run.

use super::framing::records;
use super::record::{Item, Record, What};
use super::{Options, axis};
use crate::error::{Error, Result};
use crate::files::{entries, name};
use crate::steps::Steps;
use prost::Message;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

pub(super) const PREFIX: &str = "offline-run-";
/// Number of rows of a run over all series.
pub(super) const STEP: &str = "_step";
/// Seconds since the start of the run.
pub(super) const RUNTIME: &str = "_runtime";

pub(super) fn file_name(id: &str) -> String {
    format!("run-{id}.wandb")
}

/// Returns the folders of the run's parts, oldest first.
pub(super) fn parts(dir: &Path, id: &str) -> Result<Vec<PathBuf>> {
    let is_part = |path: &PathBuf| name(path).starts_with(PREFIX) && name(path).ends_with(&format!("-{id}"));
    Ok(entries(&dir.join("wandb"))?.into_iter().filter(is_part).collect())
}

#[derive(Debug, Default)]
pub(super) struct Earlier {
    pub(super) parts: usize,
    pub(super) steps: Steps,
    pub(super) next_step: i64,
    pub(super) seconds: f64,
}

impl Earlier {
    /// Reads all parts and truncates incomplete records at their ends.
    pub(super) fn read(options: &Options) -> Result<Self> {
        let mut earlier = Self::default();
        for folder in parts(&options.dir, &options.id)? {
            let path = folder.join(file_name(&options.id));
            // A crash after creating the folder and before creating the file leaves an empty part.
            if !path.exists() {
                continue;
            }
            let bytes = grpo_files::read_regular(&path, u64::MAX).map_err(Error::io("read", &path))?;
            let Some((records, end)) = records(&bytes) else {
                return Err(Error::Format { path, reason: "expected the log of a W&B run".into() });
            };
            if end < bytes.len() as u64 {
                let cut = OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(end));
                cut.map_err(Error::io("cut the torn end of", &path))?;
            }
            earlier.parts += 1;
            for record in &records {
                let record = Record::decode(record.as_slice())
                    .map_err(|e| Error::Format { path: path.clone(), reason: format!("a record is damaged: {e}") })?;
                if let Some(What::History(history)) = record.what {
                    earlier.note(&history.item);
                }
            }
        }
        Ok(earlier)
    }

    fn note(&mut self, items: &[Item]) {
        for item in items {
            let ([key], Ok(value)) = (item.nested_key.as_slice(), item.value_json.parse::<f64>()) else { continue };
            match key.as_str() {
                STEP => self.next_step = self.next_step.max(value as i64 + 1),
                RUNTIME => self.seconds = self.seconds.max(value),
                key => {
                    let series = key.split_once('/').map(|(series, _)| series);
                    if let Some(series) = series.filter(|series| *key == axis(series)) {
                        self.steps.add(series, value as u64);
                    }
                }
            }
        }
    }
}
