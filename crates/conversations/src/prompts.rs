//! Prompts as the policy reads them.

use grpo_data::{Item, Prompt};
use grpo_models::Tokenizer;
use serde_json::Value;

/// Returns the token ids of each row's prompt. They are computed once, so that sampling and training use the same ids.
///
/// # Errors
/// The errors of the tokenizer; [`grpo_models::Error::NoChatTemplate`].
pub fn encode_prompts<'a>(
    tokenizer: &dyn Tokenizer,
    items: impl IntoIterator<Item = &'a Item>,
) -> grpo_models::Result<Vec<Vec<u32>>> {
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
/// The errors of the tokenizer; [`grpo_models::Error::NoChatTemplate`].
pub fn encode_prompt(tokenizer: &dyn Tokenizer, prompt: &Prompt) -> grpo_models::Result<Vec<u32>> {
    match prompt {
        Prompt::Text(text) => tokenizer.encode_prompt(text),
        Prompt::Rendered(text) => tokenizer.encode_rendered(text),
        Prompt::Messages { messages, tools, documents } => {
            tokenizer.encode_messages(messages, tools.as_ref(), documents.as_ref())
        }
    }
}

/// A number of bytes that no token of usual vocabularies exceeds.
const MOST_TOKEN_BYTES: usize = 128;

/// Returns the smallest number of tokens of messages if their texts are so long that they cannot have `longest` tokens or fewer: encoding them
/// would take much time and memory.
pub(crate) fn exceeds(messages: &[Value], longest: usize) -> Option<usize> {
    let bytes: usize = messages.iter().filter_map(|message| message["content"].as_str()).map(str::len).sum();
    let least = bytes / MOST_TOKEN_BYTES;
    (least > longest).then_some(least)
}
