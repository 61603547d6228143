//! Reads the rows as a run will see them.

use grpo_data::{Columns, DataReport, Prompt, PromptEncoder};
use grpo_files::counted;
use grpo_models::{HfTokenizer, ModelConfig, Tokenizer};
use grpo_trainer::TrainConfig;
use std::cell::RefCell;

/// The number of rows whose answers are inspected.
const ANSWERS: usize = 256;

/// The rows of a configuration, and the length of completions that still fits the context.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Counts of the rows that are trained on, held out and dropped.
    pub(super) report: DataReport,
    /// The number of tokens of every prompt.
    pub(super) lengths: Vec<usize>,
    /// The reference answers of some rows.
    pub(super) answers: Vec<String>,
    /// The maximum number of tokens of a completion.
    pub(super) completion: usize,
}

impl Rows {
    /// Reads the rows of `config` and encodes their prompts.
    ///
    /// # Errors
    /// The errors of `grpo data`: a row without a prompt, a template that refuses a row, files without usable rows.
    pub(super) fn read(config: &TrainConfig, shape: &ModelConfig, tokenizer: &HfTokenizer) -> anyhow::Result<Self> {
        let context = shape.max_position_embeddings;
        let set = config.rollout.max_completion_length;
        let rows = Self::read_beside(config, context, set.unwrap_or(1), tokenizer)?;
        let completion = set.unwrap_or_else(|| completion_length(config, context, &rows.lengths));
        match rows.lengths.iter().any(|length| length + completion > context) {
            // Some prompts are too long for completions of this length.
            true => Self::read_beside(config, context, completion, tokenizer),
            false => Ok(Self { completion, ..rows }),
        }
    }

    /// Reads the rows whose prompts fit into the context together with completions of `completion` tokens.
    fn read_beside(
        config: &TrainConfig,
        context: usize,
        completion: usize,
        tokenizer: &HfTokenizer,
    ) -> anyhow::Result<Self> {
        let lengths = RefCell::new(vec![]);
        let count = |prompts: &[&Prompt], _| {
            let found = grpo_setup::count_tokens(tokenizer, &config.data, prompts, 0);
            lengths.borrow_mut().extend(found.iter().flatten());
            found
        };
        let has_chat_template = tokenizer.has_chat_template();
        let max_tokens = Some(context.saturating_sub(completion));
        let encoder = PromptEncoder { has_chat_template, max_tokens, count: &count, is_exact: true };
        let (mut rows, report) = grpo_data::open(&config.data, config.seed, &encoder, None)?;
        let report = report.unwrap_or_default();
        let items = rows.next_batch(report.training().min(ANSWERS))?;
        let answers = items.into_iter().filter_map(|item| item.answer).collect();
        Ok(Self { report, lengths: lengths.take(), answers, completion })
    }

    /// Describes the number of rows and their split.
    pub(super) fn text(&self, config: &TrainConfig, found: &Columns) -> String {
        let files: Vec<String> = config.data.files.iter().map(|file| file.path.display().to_string()).collect();
        let (training, held_out, dropped) = (self.report.training(), self.report.held_out(), self.report.dropped());
        let dropped = if dropped > 0 { format!(", {dropped} dropped as too long") } else { String::new() };
        format!(
            "{}: {} with {}; {training} to train on, {held_out} held out{dropped}",
            files.join(", "),
            counted(found.rows, "row"),
            super::columns::described(found)
        )
    }

    /// Describes the lengths of prompts and completions.
    pub(super) fn lengths_text(&self, config: &TrainConfig, context: usize) -> String {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        let room = context.saturating_sub(self.completion);
        let limit = config.data.max_prompt_length.map_or(room, |limit| limit.min(room));
        let dropped = self.lengths.iter().filter(|length| **length > limit).count();
        let dropped = match dropped {
            0 => String::new(),
            _ => format!("; {} with more than {limit} are dropped", counted(dropped, "prompt")),
        };
        format!("prompts of up to {}{dropped}; completions of up to {}", counted(longest, "token"), self.completion)
    }

    /// Describes the evaluated rows.
    pub(super) fn evaluation_text(&self, config: &TrainConfig) -> String {
        match self.report.held_out() {
            0 => "off: there are too few rows to hold some out (data.held_out_fraction: 0); name rows with data.eval_files".into(),
            held_out => {
                let every = match config.eval.eval_steps {
                    0 => "before the first and after the last step".into(),
                    1 => "after every step".into(),
                    steps => format!("every {steps} steps"),
                };
                format!("{}, {every}", counted(held_out, "held-out row"))
            }
        }
    }
}

/// Returns the default length of completions, or the rest of the context after the prompts, at least half of it.
fn completion_length(config: &TrainConfig, context: usize, lengths: &[usize]) -> usize {
    let limit = config.data.max_prompt_length.unwrap_or(usize::MAX);
    let longest = lengths.iter().copied().filter(|length| *length <= limit).max().unwrap_or(0);
    let room = context.saturating_sub(longest.max(1)).max(context / 2);
    TrainConfig::default().rollout.max_completion_length().min(room).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_have_the_default_length_or_what_prompts_leave() {
        let mut config = TrainConfig::default();
        let length = |config: &TrainConfig, context, lengths: &[usize]| completion_length(config, context, lengths);
        assert_eq!(length(&config, 4096, &[10, 900]), 512);
        assert_eq!(length(&config, 256, &[10, 40]), 216);
        assert_eq!(length(&config, 256, &[10, 200]), 128, "half of the context; longer prompts are dropped");
        assert_eq!(length(&config, 2, &[1]), 1);
        config.data.max_prompt_length = Some(50);
        assert_eq!(length(&config, 256, &[10, 200]), 246);
    }
}
