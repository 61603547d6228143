//! Opens the data set that a configuration names.

use crate::config::DataConfig;
use crate::dataset::Dataset;
use crate::error::Result;
use crate::files::{DataReport, FileDataset, RowIndex};
use crate::mixture::TaskMixture;
use crate::prompt::Prompt;

/// The model's properties that a data set needs to check prompts.
pub struct PromptEncoder<'a> {
    /// `true` if the model has a chat template.
    pub has_chat_template: bool,
    /// The largest number of tokens of a prompt that leaves room for a completion in the model's context. Rows with longer prompts are dropped
    /// and counted. Without it, and without `data.max_prompt_length`, prompts are not encoded when files are opened, and a template's error
    /// about a row occurs only when the row is drawn.
    pub max_tokens: Option<usize>,
    /// Returns the number of tokens of each prompt of a batch, or an error if it cannot be encoded. The number may be an upper bound if the
    /// bound is at most the second argument, so that short prompts need not be encoded.
    pub count: &'a CountTokens<'a>,
    /// `true` if `count` never returns bounds.
    pub is_exact: bool,
}

type CountTokens<'a> = dyn Fn(&[&Prompt], usize) -> Vec<Result<usize, Box<dyn std::error::Error + Send + Sync>>> + 'a;

impl PromptEncoder<'_> {
    /// Returns the encoder of a model whose prompts are texts of unlimited length.
    pub fn none() -> Self {
        let count = &|prompts: &[&Prompt], _| prompts.iter().map(|prompt| Ok(prompt.to_string().len())).collect();
        Self { has_chat_template: false, max_tokens: None, count, is_exact: true }
    }
}

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
