//! Opens the data set that a configuration names.

use crate::config::DataConfig;
use crate::dataset::Dataset;
use crate::error::Result;
use crate::files::{DataReport, FileDataset, RowIndex};
use crate::mixture::TaskMixture;
use crate::prompt::PromptEncoder;

/// Opens the data set of a configuration: its files, or, without files, its tasks. The report counts the rows of files. With the `index` of
/// the same files, configuration and encoder, files are not read again.
///
/// ```
/// use grpo_data::{DataConfig, PromptEncoder};
///
/// # fn main() -> grpo_data::Result<()> {
/// let mut config = DataConfig::default();
/// config.tasks.addition.weight = 1.0;
/// let (mut problems, report) = grpo_data::open(&config, 0, &PromptEncoder::none(), None)?;
/// assert!(report.is_none(), "tasks are not read from files");
/// assert_eq!(problems.next_batch(4)?.len(), 4);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`TaskMixture::new`] and [`FileDataset::open`].
pub fn open(
    config: &DataConfig,
    seed: u64,
    encoder: &PromptEncoder<'_>,
    index: Option<RowIndex>,
) -> Result<(Box<dyn Dataset>, Option<DataReport>)> {
    if config.files.is_empty() {
        return Ok((Box::new(TaskMixture::new(config, seed)?), None));
    }
    let (rows, report) = match index {
        Some(index) => {
            let report = index.report().clone();
            (FileDataset::with_index(config, seed, encoder.has_chat_template, index)?, report)
        }
        None => FileDataset::open(config, seed, encoder)?,
    };
    Ok((Box::new(rows), Some(report)))
}
