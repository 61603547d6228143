//! One HTML page about runs of `grpo train`.
//!
//! A [`Report`] reads the folders of one or several runs and makes one page of them that needs nothing else: no network, no
//! other file. It shows the curves of every metric with all runs in one chart, what evaluations gave, samples by step, the
//! keys in which the configurations differ, and the figures of each run.
//!
//! Runs are read by their files (`metrics.jsonl`, `completions.jsonl`, `config.recorded.yaml`, `summary.json`, `failure.json`,
//! `changes.jsonl`) and by nothing else, so a run of an older version, of another trainer that writes such rows, or one that is
//! still going can be shown. What cannot be used of a file is named on the page; see [`Report::notes`].
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

/// The bytes of samples on a page, for all runs together.
const SAMPLE_BYTES: usize = 2_000_000;
/// What every run may have of them at least.
const SAMPLE_BYTES_OF_A_RUN: usize = 100_000;

/// Runs that were read, to be shown on one page.
#[derive(Debug)]
pub struct Report {
    runs: Vec<Run>,
    /// The configuration that a run has when nobody chooses.
    defaults: Option<serde_json::Value>,
    notes: Vec<String>,
}

impl Report {
    /// Reads the runs in these folders. Nothing in them is locked or changed: a run may go on meanwhile. A folder that is named
    /// twice is shown once.
    ///
    /// # Errors
    /// [`Error::NoRuns`]; [`Error::NotARun`] for a folder without a run; [`Error::Rows`] when a `metrics.jsonl` has lines but not
    /// one row; [`Error::File`] when a file cannot be read. Everything less is a [note](Self::notes).
    pub fn read(folders: &[PathBuf]) -> Result<Self> {
        let budget = (SAMPLE_BYTES / folders.len().max(1)).max(SAMPLE_BYTES_OF_A_RUN);
        let (mut runs, mut notes, mut seen) = (Vec::<Run>::new(), Vec::new(), Vec::new());
        for folder in folders {
            // A folder that has no real path is refused by what reads it.
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

    /// Says what a configuration is where nobody has chosen, so that the page of a single run can show what was chosen.
    #[must_use]
    pub fn with_defaults(mut self, defaults: serde_json::Value) -> Self {
        self.defaults = Some(defaults);
        self
    }

    /// The names of the runs on the page: those of their folders, with as much of the path as tells them apart.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.runs.iter().map(|run| run.name.as_str())
    }

    /// What is wrong with the files of the runs: lines that are no rows, values that are not finite, files that are missing.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let of_runs = self.runs.iter().flat_map(|run| run.notes.iter().map(|note| format!("{}: {note}", run.name)));
        self.notes.iter().cloned().chain(of_runs)
    }

    /// The page: the same for the same files.
    pub fn html(&self) -> String {
        page::html(self)
    }
}

/// Gives runs whose folders have the same name the path that the caller has written instead.
fn name_apart(runs: &mut [Run]) {
    let mut count = BTreeMap::<String, usize>::new();
    runs.iter().for_each(|run| *count.entry(run.name.clone()).or_default() += 1);
    for run in runs.iter_mut().filter(|run| count[&run.name] > 1) {
        run.name = run::shown(&run.folder.display().to_string());
    }
}
