//! Opens the data set that a configuration names.

use crate::config::DataConfig;
use crate::dataset::Dataset;
use crate::error::Result;
use crate::files::{DataReport, FileDataset};
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
    /// Counts the tokens of a prompt.
    pub count: &'a CountTokens<'a>,
}

/// A function that returns the number of tokens of a prompt, or an error if it cannot be encoded.
type CountTokens<'a> = dyn Fn(&Prompt) -> Result<usize, Box<dyn std::error::Error + Send + Sync>> + 'a;

impl PromptEncoder<'_> {
    /// Returns the encoder of a model whose prompts are texts of unlimited length.
    pub fn none() -> Self {
        Self { has_chat_template: false, max_tokens: None, count: &|prompt| Ok(prompt.to_string().len()) }
    }
}

/// Opens the data set of a configuration: its files, or, without files, its tasks. The report counts the rows of files.
///
/// ```
/// use data::{DataConfig, PromptEncoder};
///
/// # fn main() -> data::Result<()> {
/// let mut config = DataConfig::default();
/// config.tasks.addition.weight = 1.0;
/// let (mut problems, report) = data::open(&config, 0, &PromptEncoder::none())?;
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
) -> Result<(Box<dyn Dataset>, Option<DataReport>)> {
    if config.files.is_empty() {
        return Ok((Box::new(TaskMixture::new(config, seed)?), None));
    }
    let (rows, report) = FileDataset::open(config, seed, encoder)?;
    Ok((Box::new(rows), Some(report)))
}
