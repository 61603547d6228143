//! Rows of a data set as the policy reads them.

use crate::error::{Error, Result};
use grpo_data::{ApplyChatTemplate, DataConfig, DataReport, Dataset, Prompt, PromptEncoder, RowIndex};
use grpo_files::counted;
use grpo_models::{ChatTemplate, HfTokenizer, ModelFolder, TRAINING_TEMPLATES, Tokenizer};
use grpo_rewards::Rewards;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The key of a chat template that replaces the model's.
const CHAT_TEMPLATE: &str = "data.chat_template";
/// The key of a chat template for training.
const TRAINING_CHAT_TEMPLATE: &str = "data.training_chat_template";

/// The largest file of a chat template, in bytes.
const MAX_TEMPLATE: u64 = 4 << 20;

/// Returns the tokenizer of a model folder as a run uses it: with the folder's stop tokens, and with the chat template and its variables
/// that the section `data` sets, and the date that it writes.
///
/// # Errors
/// The errors of [`HfTokenizer::open`]; [`grpo_trainer::Error::Config`] for a chat template that cannot be read or parsed, and for an invalid date.
pub fn open_tokenizer(folder: &ModelFolder, config: &DataConfig) -> Result<HfTokenizer> {
    let stop_ids = &folder.generation().eos_token_id;
    let tokenizer = HfTokenizer::open(folder.path(), stop_ids, folder.config().vocab_size)?;
    let mut tokenizer = tokenizer.with_chat_template_kwargs(config.chat_template_kwargs.clone());
    if let Some(path) = &config.chat_template {
        tokenizer = with_template_of(tokenizer, CHAT_TEMPLATE, path)?;
    }
    if let Some(path) = &config.training_chat_template {
        let built_in = TRAINING_TEMPLATES.iter().find(|(name, _)| path.as_os_str() == *name);
        tokenizer = match built_in {
            Some((name, source)) => tokenizer.with_chat_template(source, &format!("{TRAINING_CHAT_TEMPLATE}: {name}")),
            None => with_template_of(tokenizer, TRAINING_CHAT_TEMPLATE, path)?,
        };
    }
    match &config.template_date {
        Some(date) => tokenizer.with_template_date(date).map_err(|error| match error {
            grpo_models::Error::Date { .. } => {
                let expected = "a date such as 2026-11-25 or 2026-11-25T09:30:00";
                grpo_run_config::Error::key("data.template_date", expected, date).into()
            }
            other => other.into(),
        }),
        None => Ok(tokenizer),
    }
}

/// Returns the tokenizer with the chat template of a file.
fn with_template_of(tokenizer: HfTokenizer, key: &'static str, path: &Path) -> Result<HfTokenizer> {
    let expected = format!(
        "the path of a template in Jinja, such as `{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\\n{{{{ m.content }}}}<|im_end|>\\n\
         {{% endfor %}}<|im_start|>assistant\\n`, e.g. `--set {key}=chatml.jinja`"
    );
    let refused = |found: String| Error::from(grpo_run_config::Error::key(key, expected.as_str(), found));
    let file = path.display().to_string();
    let bytes = grpo_files::read_regular(path, MAX_TEMPLATE).map_err(|e| refused(format!("{file}: {e}")))?;
    let source = String::from_utf8(bytes).map_err(|e| refused(format!("{file}: {e}")))?;
    let origin = format!("{key}, {file}");
    ChatTemplate::new(&source, &origin).check().map_err(|e| refused(e.to_string()))?;
    Ok(tokenizer.with_chat_template(&source, &origin))
}

/// Opens the data set of a configuration for a model's tokenizer. Rows with prompts of more than `max_tokens`, after which the context has
/// no room for a completion, are dropped and counted in the report; tasks have no report. With the `index` of the same files, configuration
/// and model, files are not read again.
///
/// # Errors
/// The errors of [`grpo_data::open`].
pub fn open_data(
    config: &DataConfig,
    seed: u64,
    tokenizer: &dyn Tokenizer,
    max_tokens: usize,
    index: Option<RowIndex>,
) -> Result<(Box<dyn Dataset>, Option<DataReport>)> {
    let count = |prompts: &[&Prompt], limit| count_tokens(tokenizer, config, prompts, limit);
    let has_chat_template = tokenizer.has_chat_template();
    let encoder = PromptEncoder { has_chat_template, max_tokens: Some(max_tokens), count: &count, is_exact: false };
    Ok(grpo_data::open(config, seed, &encoder, index)?)
}

/// Counts the tokens of prompts on all threads. Results of at most `limit` may be upper bounds.
///
/// # Errors
/// Each prompt has its own result: the errors of [`grpo_conversations::encode_prompt`], and an error for a text with special-token strings if
/// `data.prompts_are_rendered` is not set. Prompts behind the first with an error may be left out, with an error that says so: a template
/// may take seconds until it exceeds its limit of steps.
pub fn count_tokens(
    tokenizer: &dyn Tokenizer,
    config: &DataConfig,
    prompts: &[&Prompt],
    limit: usize,
) -> Vec<std::result::Result<usize, Box<dyn std::error::Error + Send + Sync>>> {
    let one = |prompt: &Prompt| {
        match prompt {
        Prompt::Text(text) => match tokenizer.special_token(text).filter(|_| config.prompts_are_rendered.is_none()) {
            Some(token) => Err(format!(
                "a text with the special token {token:?} looks like a prompt that a chat template has rendered before, and its special tokens \
                 would be read as text: set data.prompts_are_rendered=true if it has been rendered (special tokens are special then, and BOS \
                 comes once), or false if it is text; or give `messages`, which the chat template of the model renders"
            )
            .into()),
            None => Ok(tokenizer.count_prompt(text, limit)?),
        },
        Prompt::Rendered(text) => Ok(tokenizer.encode_rendered(text)?.len()),
        Prompt::Messages { messages, tools, documents } => {
            Ok(tokenizer.count_messages(messages, tools.as_ref(), documents.as_ref(), limit)?)
        }
    }
    };
    let failed = AtomicUsize::new(usize::MAX);
    let indexed: Vec<(usize, &Prompt)> = prompts.iter().copied().enumerate().collect();
    grpo_models::map_on_template_threads(&indexed, rayon::current_num_threads(), |(index, prompt)| {
        if failed.load(Ordering::Relaxed) < *index {
            return Err("an earlier prompt has an error".into());
        }
        one(prompt).inspect_err(|_| {
            failed.fetch_min(*index, Ordering::Relaxed);
        })
    })
}

/// Checks that rows have the reference answers that rewards need, and warns of text prompts that bypass a chat template.
///
/// # Errors
/// [`grpo_data::Error::File`] for rows without a reference answer if a reward needs one.
pub fn check_rows(config: &DataConfig, report: &DataReport, rewards: &Rewards, has_chat_template: bool) -> Result<()> {
    let texts = report.text_prompts();
    if has_chat_template && config.apply_chat_template == ApplyChatTemplate::Auto && texts > 0 {
        tracing::warn!(
            "the prompts of {} are texts, and the model has a chat template: a text is sent as it is; use `messages`, or \
             `data.apply_chat_template: true` (`false` keeps it as it is, without this warning)",
            counted(texts, "row")
        );
    }
    match rewards.needing_answers().next() {
        Some(reward) => Ok(report.expect_answers(reward)?),
        None => Ok(()),
    }
}
