//! `{"name": ..., "parameters": {...}}` as the whole message, or within text as in vLLM; several are separated by `;`.

use super::scan::{json_at_start, no_calls};
use super::{MOST_CALLS, Parsed, ToolCall};
use serde_json::Value;

/// The token before a call in some versions of Llama.
pub(super) const TAG: &str = "<|python_tag|>";

pub(super) fn parse(text: &str) -> Parsed {
    let trimmed = text.trim();
    let (is_tagged, mut rest) = match trimmed.strip_prefix(TAG) {
        Some(rest) => (true, rest.trim_start()),
        None => (false, trimmed),
    };
    if !is_tagged && !rest.starts_with('{') {
        return within(text);
    }
    let mut calls = Vec::new();
    while !rest.is_empty() && calls.len() < MOST_CALLS {
        match json_at_start(rest) {
            // A message that is JSON without a name is an answer.
            Some(Ok((value, behind))) if value.get("name").is_some() || is_tagged => {
                calls.push(ToolCall::from_json(&value));
                rest = behind.trim_start();
            }
            Some(Err(error)) if is_tagged || rest.starts_with("{\"name\"") => {
                calls.push(Err(format!("the tool call is no JSON: {error}")));
                break;
            }
            // Text behind a call.
            _ if calls.first().is_some_and(Result::is_ok) => {
                return Parsed { content: rest.to_owned(), calls };
            }
            _ => return no_calls(text),
        }
        rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
    }
    let content = if calls.is_empty() { trimmed.to_owned() } else { String::new() };
    Parsed { content, calls }
}

/// Reads the calls within a text. If another JSON object is in it, the text is an answer.
fn within(text: &str) -> Parsed {
    let (mut content, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, object)) = rest.find('{').map(|at| rest.split_at(at))
        && calls.len() < MOST_CALLS
    {
        let is_call = |value: &Value| {
            value["name"].is_string() && ["arguments", "parameters"].iter().any(|key| value.get(*key).is_some())
        };
        let Some(Ok((value, behind))) =
            json_at_start(object).filter(|read| read.as_ref().is_ok_and(|(v, _)| is_call(v)))
        else {
            return no_calls(text);
        };
        content.push_str(before);
        calls.push(ToolCall::from_json(&value));
        let next = behind.trim_start().strip_prefix(';');
        rest = next.unwrap_or(behind);
    }
    content.push_str(rest);
    content = content.replace(TAG, "");
    Parsed { content: content.trim().to_owned(), calls }
}
