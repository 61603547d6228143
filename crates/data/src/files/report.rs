//! What became of the rows of files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// How many rows were read, kept, held out and dropped, file by file. Its text has a line per file and reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DataReport {
    /// The files of `data.files`, then those of `data.eval_files`.
    pub files: Vec<FileReport>,
}

/// What became of the rows of one file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileReport {
    /// The path of the data file that the numbers are of.
    pub path: PathBuf,
    /// The number of its rows.
    pub rows: usize,
    /// The number of rows that are trained on.
    pub training: usize,
    /// The number of rows that are held out.
    pub held_out: usize,
    /// The number of rows that were dropped, by reason.
    pub dropped: BTreeMap<String, usize>,
}

impl DataReport {
    /// The number of rows that are trained on.
    pub fn training(&self) -> usize {
        self.files.iter().map(|file| file.training).sum()
    }

    /// The number of rows that are held out.
    pub fn held_out(&self) -> usize {
        self.files.iter().map(|file| file.held_out).sum()
    }

    /// The number of rows that were dropped.
    pub fn dropped(&self) -> usize {
        self.files.iter().flat_map(|file| file.dropped.values()).sum()
    }
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, file) in self.files.iter().enumerate() {
            let FileReport { path, rows, training, held_out, dropped } = file;
            f.write_str(if index > 0 { "\n" } else { "" })?;
            write!(f, "{}: {rows} rows, {training} to train on, {held_out} held out", path.display())?;
            for (reason, count) in dropped {
                write!(f, "\n  {count} dropped: {reason}")?;
            }
        }
        Ok(())
    }
}
