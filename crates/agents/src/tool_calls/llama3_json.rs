//! `{"name": ..., "parameters": {...}}` as the whole message; several are separated by `;`.

use super::{Parsed, ToolCall};
use serde_json::{Deserializer, Value};

/// The token before a call in some versions of Llama.
const TAG: &str = "<|python_tag|>";

pub(super) fn parse(text: &str) -> Parsed {
    let trimmed = text.trim();
    let (is_tagged, mut rest) = match trimmed.strip_prefix(TAG) {
        Some(rest) => (true, rest.trim_start()),
        None => (false, trimmed),
    };
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            // A message that is JSON without a name is an answer.
            Some(Ok(value)) if value.get("name").is_some() || is_tagged => {
                calls.push(ToolCall::from_json(&value, &["parameters", "arguments"]));
            }
            Some(Err(error)) if is_tagged || rest.starts_with("{\"name\"") => {
                calls.push(Err(format!("the tool call is no JSON: {error}")));
                break;
            }
            _ => return Parsed { content: text.trim().to_owned(), calls: Vec::new() },
        }
        rest = rest[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
    }
    let content = if calls.is_empty() { trimmed.to_owned() } else { String::new() };
    Parsed { content, calls }
}
