//! The positions of the rows of files.

use super::lines::RowPosition;
use super::report::DataReport;
use serde::{Deserialize, Serialize};

/// The result of reading files: the positions of training and held-out rows, and the report. It is valid only for the same files,
/// configuration and encoder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowIndex {
    /// The positions of the training rows of each file, starting with `data.eval_files`.
    pub(super) training: Vec<Vec<RowPosition>>,
    /// The held-out rows by file and position, in the order of their hashes.
    pub(super) held_out: Vec<(usize, RowPosition)>,
    pub(super) report: DataReport,
}

impl RowIndex {
    /// The counts of rows.
    pub fn report(&self) -> &DataReport {
        &self.report
    }
}
