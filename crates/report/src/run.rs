//! Reads a run from its folder.

use crate::config;
use crate::error::{Error, Result};
use crate::html::is_shown;
use crate::lines::each_row;
use crate::phase::{Phase, Row};
use crate::samples::Samples;
use grpo_files::{read_regular, redact_at};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The size limit of summary.json and failure.json in bytes.
const MAX_SUMMARY: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct Run {
    /// The unique name on the page.
    pub name: String,
    pub folder: PathBuf,
    /// The configuration that the run last started or resumed with.
    pub config: Option<Value>,
    pub changes: Vec<Change>,
    pub phases: BTreeMap<String, Phase>,
    pub samples: Samples,
    /// summary.json of a finished run.
    pub summary: Option<Summary>,
    /// The error in failure.json, if the run failed.
    pub failure: Option<String>,
    /// Problems in the files, for the reader of the page.
    pub notes: Vec<String>,
}

/// A row of changes.jsonl: a key whose value changed on resume.
#[derive(Debug, Deserialize)]
pub(crate) struct Change {
    pub checkpoint: Option<String>,
    pub key: String,
    pub from: Value,
    pub to: Value,
}

/// The fields of failure.json on the page.
#[derive(Debug, Deserialize)]
struct Failure {
    error: String,
}

/// The fields of summary.json on the page. All other values are computed from rows.
#[derive(Debug, Deserialize)]
pub(crate) struct Summary {
    pub seconds: Option<f64>,
}

impl Run {
    /// Reads the run in `folder`, with about `budget` bytes of samples. Nothing is locked or changed, so the run may still be training.
    pub(crate) fn read(folder: &Path, budget: usize) -> Result<Self> {
        let file = |name: &str| Some(folder.join(name)).filter(|path| path.symlink_metadata().is_ok());
        let config_file = file("config.recorded.yaml").or_else(|| file("config.yaml"));
        let metrics_file = file("metrics.jsonl");
        if config_file.is_none() && metrics_file.is_none() {
            return Err(Error::NotARun { path: folder.to_owned(), reason: why_no_run(folder) });
        }
        let mut notes = Vec::new();
        let config = match config_file {
            None => {
                notes.push("there is no config.yaml, so nothing is known of its configuration".to_owned());
                None
            }
            Some(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                config::read(&path).map_err(|e| notes.push(format!("{name} cannot be used: {e}"))).ok()
            }
        };
        let phases = match &metrics_file {
            Some(path) => read_phases(path, &mut notes)?,
            None => BTreeMap::new(),
        };
        if phases.is_empty() {
            notes.push("metrics.jsonl has no rows yet".to_owned());
        }
        let samples = match file("completions.jsonl") {
            Some(path) => {
                let (samples, reading) = Samples::read(&path, budget)?;
                notes.extend(reading.notes("completions.jsonl"));
                samples
            }
            None => Samples::default(),
        };
        let mut changes = Vec::new();
        if let Some(path) = file("changes.jsonl") {
            let reading = each_row(&path, |mut change: Change, _| {
                redact_at(&change.key, &mut change.from);
                redact_at(&change.key, &mut change.to);
                changes.push(change);
                Ok(())
            })?;
            notes.extend(reading.notes("changes.jsonl"));
        }
        let summary = read_json(file("summary.json"), &mut notes);
        let failure = read_json(file("failure.json"), &mut notes).map(|failure: Failure| failure.error);
        let name = folder_name(folder);
        Ok(Self { name, folder: folder.to_owned(), config, changes, phases, samples, summary, failure, notes })
    }

    pub(crate) fn phase(&self, name: &str) -> Option<&Phase> {
        self.phases.get(name)
    }

    /// Returns a value of the configuration by its dotted key.
    pub(crate) fn setting(&self, key: &str) -> Option<&Value> {
        key.split('.').try_fold(self.config.as_ref()?, |value, part| value.get(part))
    }
}

/// Reads a small JSON file. An error becomes a note.
fn read_json<T: DeserializeOwned>(path: Option<PathBuf>, notes: &mut Vec<String>) -> Option<T> {
    let path = path?;
    let bytes = read_regular(&path, MAX_SUMMARY).map_err(|e| e.to_string());
    let content = bytes.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|e| e.to_string()));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    content.map_err(|e| notes.push(format!("{name} cannot be used: {e}"))).ok()
}

fn read_phases(path: &Path, notes: &mut Vec<String>) -> Result<BTreeMap<String, Phase>> {
    let mut phases = BTreeMap::<String, Phase>::new();
    let reading = each_row(path, |row: Row, _| phases.entry(row.phase.clone()).or_default().add(row))?;
    if let (0, Some((line, reason))) = (reading.rows, &reading.first_bad) {
        let reason = format!("none of its {} lines is a row of a run; line {line}: {reason}", reading.bad);
        return Err(Error::Rows { path: path.to_owned(), reason });
    }
    notes.extend(reading.notes("metrics.jsonl"));
    // Drops phases without a valid row.
    phases.retain(|_, phase| !phase.clock.is_empty());
    for (name, phase) in &mut phases {
        if phase.sort() {
            notes.push(format!("metrics.jsonl: the steps of `{name}` are not in order; they were sorted"));
        }
        let gaps = |points: &Vec<crate::curve::Point>| points.iter().filter(|point| point.value.is_none()).count();
        let broken = phase.series.iter().map(|(metric, points)| (metric, gaps(points))).filter(|(_, gaps)| *gaps > 0);
        let broken: Vec<String> = broken.map(|(metric, gaps)| format!("{metric} ({gaps})")).collect();
        if !broken.is_empty() {
            notes.push(format!(
                "metrics.jsonl: values of `{name}` that are not finite, shown as gaps: {}",
                broken.join(", ")
            ));
        }
    }
    Ok(phases)
}

/// Returns the last component of a folder's path; `.` and the like are resolved first.
fn folder_name(folder: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let real = || folder.canonicalize().ok().and_then(|path| name(&path));
    shown(&name(folder).or_else(real).unwrap_or_else(|| folder.display().to_string()))
}

/// Returns a name without characters that a terminal or a page interprets.
pub(crate) fn shown(name: &str) -> String {
    name.chars().map(|c| if is_shown(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

fn why_no_run(folder: &Path) -> String {
    match std::fs::metadata(folder) {
        Err(error) => return format!("it cannot be opened: {error}"),
        Ok(metadata) if !metadata.is_dir() => {
            return "expected the folder of a run, got a file: name the folder that it is in".to_owned();
        }
        Ok(_) => {}
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut inside: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_run(path)).collect();
    inside.sort();
    let reason = "there is no run in it (neither config.yaml nor metrics.jsonl)";
    match inside.as_slice() {
        [] => reason.to_owned(),
        [first, ..] => {
            format!("{reason}, but in {} of its folders: name those, e.g. {}", inside.len(), first.display())
        }
    }
}

fn is_run(path: &Path) -> bool {
    path.join("config.yaml").is_file() || path.join("metrics.jsonl").is_file()
}
