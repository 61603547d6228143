//! Counts of the rows of files.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

/// The numbers of rows that were read, kept, held out and dropped, by file. Formatted as one line per file and reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DataReport {
    /// The reports of `data.files`, then of `data.eval_files`.
    pub files: Vec<FileReport>,
}

/// The counts of one file's rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileReport {
    /// The path of the file.
    pub path: PathBuf,
    /// The number of its rows.
    pub rows: usize,
    /// The number of training rows.
    pub training: usize,
    /// The number of held-out rows.
    pub held_out: usize,
    /// The number of dropped rows by reason.
    pub dropped: BTreeMap<String, usize>,
    /// The number of kept rows without a reference answer.
    pub without_answer: usize,
    /// The line number, from 1, of the first such row.
    pub first_without_answer: Option<u64>,
    /// The number of kept rows whose prompt is a text that no chat template renders.
    pub text_prompts: usize,
    /// The number of tokens of the longest prompt of kept rows; 0 if prompts were not encoded.
    pub longest_prompt: usize,
    /// The columns of the rows.
    pub columns: BTreeSet<String>,
}

/// Usual names of the column of right answers other than `answer`, in order of preference.
pub const ANSWER_COLUMNS: [&str; 19] = [
    "solution",
    "final_answer",
    "ground_truth",
    "groundtruth",
    "expected_answer",
    "correct_answer",
    "reference_answer",
    "gold_answer",
    "gold",
    "reference",
    "target",
    "label",
    "answers.text",
    "answers",
    "short_answer",
    "output",
    "response",
    "completion",
    "reward_model.ground_truth",
];

/// Returns the column that most likely has the right answers, by its name in any case, with `-` or `_`.
pub(super) fn likely_answer_column<'a>(columns: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let is_named = |column: &str, name: &str| column.to_lowercase().replace('-', "_") == name;
    let mut names = std::iter::once("answer").chain(ANSWER_COLUMNS);
    names.find_map(|name| columns.clone().find(|column| is_named(column, name)))
}

impl DataReport {
    /// Returns the number of tokens of the longest prompt of kept rows.
    pub fn longest_prompt(&self) -> usize {
        self.files.iter().map(|file| file.longest_prompt).max().unwrap_or(0)
    }

    /// Returns the number of training rows.
    pub fn training(&self) -> usize {
        self.files.iter().map(|file| file.training).sum()
    }

    /// Returns the number of held-out rows.
    pub fn held_out(&self) -> usize {
        self.files.iter().map(|file| file.held_out).sum()
    }

    /// Returns the number of rows whose prompt is a text that no chat template renders.
    pub fn text_prompts(&self) -> usize {
        self.files.iter().map(|file| file.text_prompts).sum()
    }

    /// Checks that every row has a reference answer, as `reward` requires.
    ///
    /// # Errors
    /// [`Error::File`] with the existing columns.
    pub fn expect_answers(&self, reward: &str) -> Result<()> {
        let Some(file) = self.files.iter().find(|file| file.without_answer > 0) else { return Ok(()) };
        let kept = file.training + file.held_out;
        let count = match file.without_answer {
            1 if kept == 1 => "its one row lacks".into(),
            all if all == kept => format!("none of its {kept} rows has"),
            some => {
                let (first, lack) = (file.first_without_answer.unwrap_or(0), if some == 1 { "lacks" } else { "lack" });
                format!("{some} of its {kept} rows (the first in line {first}) {lack}")
            }
        };
        let usual = file.likely_answer_column().unwrap_or("COLUMN");
        let reason = format!(
            "{count} a right answer, which the reward `{reward}` needs: expected one in column `answer`, found the columns {}; name the \
             column with data.answer_column, e.g. `--set data.answer_column={usual}`, or choose rewards that need no answer",
            quoted(file.columns.iter(), ", ")
        );
        Err(Error::File { path: file.path.clone(), reason })
    }

    /// Returns the column that most likely has the right answers, for the first file with rows without one.
    pub fn likely_answer_column(&self) -> Option<&str> {
        self.files.iter().filter(|file| file.without_answer > 0).find_map(FileReport::likely_answer_column)
    }

    /// Returns the number of dropped rows.
    pub fn dropped(&self) -> usize {
        self.files.iter().flat_map(|file| file.dropped.values()).sum()
    }
}

impl FileReport {
    fn likely_answer_column(&self) -> Option<&str> {
        // An `answer` that some rows lack is no other column.
        likely_answer_column(self.columns.iter().map(String::as_str).filter(|column| *column != "answer"))
    }
}

pub(super) fn quoted(names: impl Iterator<Item = impl std::fmt::Display>, separator: &str) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(separator)
}

fn count_rows(count: usize) -> String {
    if count == 1 { "1 row".into() } else { format!("{count} rows") }
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, file) in self.files.iter().enumerate() {
            let FileReport { path, training, held_out, dropped, .. } = file;
            let rows = count_rows(file.rows);
            f.write_str(if index > 0 { "\n" } else { "" })?;
            write!(f, "{}: {rows}, {training} to train on, {held_out} held out", path.display())?;
            for (reason, count) in dropped {
                write!(f, "\n  {count} dropped: {reason}")?;
            }
        }
        Ok(())
    }
}
