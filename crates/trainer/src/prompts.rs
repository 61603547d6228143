//! Rows of a data set as the policy reads them.

use data::{Item, Prompt};
use models::Tokenizer;

/// The token ids of each row's prompt. They are made once: what is sampled behind them is trained on behind the same ids.
///
/// # Errors
/// Those of the tokenizer, and [`models::Error::NoChatTemplate`].
pub(crate) fn encode_prompts<'a>(
    tokenizer: &dyn Tokenizer,
    items: impl IntoIterator<Item = &'a Item>,
) -> models::Result<Vec<Vec<u32>>> {
    items.into_iter().map(|item| encode_prompt(tokenizer, &item.prompt)).collect()
}

/// The token ids of a prompt.
pub(crate) fn encode_prompt(tokenizer: &dyn Tokenizer, prompt: &Prompt) -> models::Result<Vec<u32>> {
    match prompt {
        Prompt::Text(text) => tokenizer.encode_prompt(text),
        Prompt::Messages { messages, tools } => tokenizer.encode_messages(messages, tools.as_ref()),
    }
}
