//! Prompts.

use crate::error::Result;
use grpo_files::mark_long_integers;
use grpo_rng::stable_hash;
use serde_json::Value;
use std::fmt;

/// A prompt: text that the policy continues, or the messages of a conversation for a chat template.
///
/// ```
/// use grpo_data::Prompt;
/// use serde_json::json;
///
/// let text = Prompt::from("37+48=");
/// let chat = Prompt::Messages { messages: vec![json!({"role": "user", "content": "What is 37 + 48?"})], tools: None, documents: None };
/// assert_eq!(chat.to_string(), "user: What is 37 + 48?");
/// # assert_eq!(text.to_string(), "37+48=");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text that the policy continues unchanged.
    Text(String),
    /// Text that a chat template has already rendered: special-token strings in it are parsed as special tokens.
    Rendered(String),
    /// A conversation in the format of OpenAI and Hugging Face, which the model's chat template renders.
    Messages {
        /// The messages: objects with `role` and `content`, and other keys that the template uses.
        messages: Vec<Value>,
        /// The tools for the template: a list of functions as JSON schemas.
        tools: Option<Value>,
        /// The documents for the template: a list of objects, usually with `title` and `text`.
        documents: Option<Value>,
    },
}

impl Prompt {
    /// Returns `true` if a chat template renders or has rendered the prompt, and `false` for text that is sent unchanged.
    pub fn is_rendered(&self) -> bool {
        matches!(self, Self::Messages { .. } | Self::Rendered(_))
    }
}

/// Returns a hash of a prompt's text that is the same on every machine: [`stable_hash`] with its bits mixed.
pub(crate) fn prompt_hash(prompt: &str) -> u64 {
    stable_hash(prompt).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) fn is_held_out(hash: u64, fraction: f64) -> bool {
    // The top 53 bits, scaled to [0, 1).
    ((hash >> 11) as f64) / ((1u64 << 53) as f64) < fraction
}

/// Returns `true` for a message: an object with `role` and `content`. A message of the assistant may lack the content, and a result of a tool
/// may have null, as a function without a result returns.
pub(crate) fn is_message(value: &Value) -> bool {
    match value.get("role").and_then(Value::as_str) {
        None => false,
        Some("assistant") => true,
        Some("tool") => value.get("content").is_some(),
        Some(_) => value.get("content").is_some_and(|content| !content.is_null()),
    }
}

/// Returns the list that a JSON text holds, as columns of Arrow do whose rows have different schemas. Entries that are JSON texts of objects
/// are parsed, too. `None` for other texts.
pub(crate) fn list_in_text(text: &str) -> Option<Vec<Value>> {
    if !text.trim_start().starts_with('[') {
        return None;
    }
    serde_json::from_str(&mark_long_integers(text)).ok().map(parsed_entries)
}

/// Parses the entries that are JSON texts of objects.
pub(crate) fn parsed_entries(mut entries: Vec<Value>) -> Vec<Value> {
    for entry in &mut entries {
        let object = entry.as_str().filter(|text| text.trim_start().starts_with('{'));
        if let Some(object @ Value::Object(_)) =
            object.and_then(|text| serde_json::from_str(&mark_long_integers(text)).ok())
        {
            *entry = object;
        }
    }
    entries
}

/// Returns the messages of a conversation: a list, or the JSON text of one. `None` for other values.
pub(crate) fn messages(value: &Value) -> Option<Vec<Value>> {
    let entries = match value {
        Value::Array(entries) => parsed_entries(entries.clone()),
        Value::String(text) => list_in_text(text)?,
        _ => return None,
    };
    (!entries.is_empty() && entries.iter().all(is_message)).then_some(entries)
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Writes the text, or the messages as lines `role: content`, for logs; the policy's prompt has another format.
impl fmt::Display for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) | Self::Rendered(text) => f.write_str(text),
            Self::Messages { messages, .. } => {
                for (i, message) in messages.iter().enumerate() {
                    let role = message.get("role").and_then(Value::as_str).unwrap_or("message");
                    f.write_str(if i > 0 { "\n" } else { "" })?;
                    match message.get("content") {
                        Some(Value::String(content)) => write!(f, "{role}: {content}")?,
                        Some(content) => write!(f, "{role}: {content}")?,
                        None => write!(f, "{message}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

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
