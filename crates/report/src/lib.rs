#![doc = include_str!("../README.md")]
//! A [`Report`] reads the folders of one or several runs and renders the page.
//!
//! Only the files of a run are read (`metrics.jsonl`, `completions.jsonl`, `config.recorded.yaml`, `summary.json`, `failure.json`,
//! `changes.jsonl`), so runs of older versions, of other trainers with the same rows, and unfinished runs can be shown. Unusable
//! parts of files are listed on the page; see [`Report::notes`].
//!
//! ```
//! use grpo_report::Report;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let run = folder.path().join("first");
//! std::fs::create_dir(&run)?;
//! std::fs::write(run.join("metrics.jsonl"), "{\"phase\":\"grpo\",\"step\":1,\"reward\":0.5}\n")?;
//!
//! let report = Report::read(&[run])?;
//! assert_eq!(report.names().collect::<Vec<_>>(), ["first"]);
//! assert!(report.html().starts_with("<!DOCTYPE html>"));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod config;
mod curve;
mod data;
mod error;
mod figures;
mod html;
mod lines;
mod page;
mod phase;
mod run;
mod samples;

pub use error::{Error, Result};

use run::Run;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The size limit of samples on a page in bytes, for all runs together.
const SAMPLE_BYTES: usize = 2_000_000;
/// The size limit of a run's samples in bytes is at least this.
const SAMPLE_BYTES_OF_A_RUN: usize = 100_000;

/// Runs to be shown on one page.
#[derive(Debug)]
pub struct Report {
    runs: Vec<Run>,
    /// The default configuration of a run.
    defaults: Option<serde_json::Value>,
    notes: Vec<String>,
}

impl Report {
    /// Reads the runs in these folders. Nothing is locked or changed, so a run may still be training. A folder that is given twice is shown
    /// once.
    ///
    /// # Errors
    /// [`Error::NoRuns`]; [`Error::NotARun`] for a folder without a run; [`Error::Rows`] if a `metrics.jsonl` has lines but no valid row;
    /// [`Error::File`] if a file cannot be read. Smaller problems are [notes](Self::notes).
    pub fn read(folders: &[PathBuf]) -> Result<Self> {
        let budget = (SAMPLE_BYTES / folders.len().max(1)).max(SAMPLE_BYTES_OF_A_RUN);
        let (mut runs, mut notes, mut seen) = (Vec::<Run>::new(), Vec::new(), Vec::new());
        for folder in folders {
            // A folder without a real path fails when it is read.
            let real = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            if seen.contains(&real) {
                notes.push(format!("{} was named twice and is shown once", folder.display()));
                continue;
            }
            seen.push(real);
            runs.push(Run::read(folder, budget)?);
        }
        if runs.is_empty() {
            return Err(Error::NoRuns);
        }
        name_apart(&mut runs);
        Ok(Self { runs, defaults: None, notes })
    }

    /// Sets the default configuration, from which the page of a single run shows the differences.
    #[must_use]
    pub fn with_defaults(mut self, defaults: serde_json::Value) -> Self {
        self.defaults = Some(defaults);
        self
    }

    /// Returns the names of the runs on the page: their folder names, with parent folders if needed to distinguish them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.runs.iter().map(|run| run.name.as_str())
    }

    /// Returns problems in the files of the runs: invalid lines, non-finite values, missing files.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let run_notes = self.runs.iter().flat_map(|run| run.notes.iter().map(|note| format!("{}: {note}", run.name)));
        self.notes.iter().cloned().chain(run_notes)
    }
}

/// Names runs whose folders have the same name by the paths as given.
fn name_apart(runs: &mut [Run]) {
    let mut count = BTreeMap::<String, usize>::new();
    runs.iter().for_each(|run| *count.entry(run.name.clone()).or_default() += 1);
    for run in runs.iter_mut().filter(|run| count[&run.name] > 1) {
        run.name = run::shown(&run.folder.display().to_string());
    }
}
