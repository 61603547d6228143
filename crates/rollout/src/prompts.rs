//! Prompts as the policy reads them.

use data::{Item, Prompt};
use models::Tokenizer;

/// Returns the token ids of each row's prompt. They are computed once, so that sampling and training use the same ids.
///
/// # Errors
/// The errors of the tokenizer; [`models::Error::NoChatTemplate`].
pub fn encode_prompts<'a>(
    tokenizer: &dyn Tokenizer,
    items: impl IntoIterator<Item = &'a Item>,
) -> models::Result<Vec<Vec<u32>>> {
    items.into_iter().map(|item| encode_prompt(tokenizer, &item.prompt)).collect()
}

/// Returns `true` if a prompt ends with `<think>`, as with some chat templates.
pub fn opens_think(tokenizer: &dyn Tokenizer, prompt: &[u32]) -> bool {
    /// More tokens than any tokenizer needs for the tag.
    const TAIL: usize = 16;
    let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL)..]);
    tail.is_ok_and(|text| text.trim_end().ends_with("<think>"))
}

/// Returns the token ids of a prompt.
///
/// # Errors
/// The errors of the tokenizer; [`models::Error::NoChatTemplate`].
pub fn encode_prompt(tokenizer: &dyn Tokenizer, prompt: &Prompt) -> models::Result<Vec<u32>> {
    match prompt {
        Prompt::Text(text) => tokenizer.encode_prompt(text),
        Prompt::Rendered(text) => tokenizer.encode_rendered(text),
        Prompt::Messages { messages, tools, documents } => {
            tokenizer.encode_messages(messages, tools.as_ref(), documents.as_ref())
        }
    }
}
